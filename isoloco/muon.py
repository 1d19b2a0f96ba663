"""Muon: orthogonalised momentum for hidden matrices and AdamW for everything else, in one optimizer."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as adamw_update

from isoloco.local_part import chunks, local_part
from isoloco.matrix_role import matrix_role
from isoloco.newton_schulz import coefficient_triples, divide_by_norm, independent, orthogonalize
from isoloco.optimizer_state import state_dtype, zero_state
from isoloco.parameter_names import SplitSizes, matching_names, matrices, named_tensors
from isoloco.whole_matrix import Job, WholeMatrices

logger = logging.getLogger("isoloco")

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""What the singular values of an update are, times the learning rate, for a matrix of so many rows and columns."""

IMPLEMENTATIONS: dict[str | None, dict[str, bool | None]] = {
    None: {"foreach": None, "fused": None},
    "fused": {"foreach": False, "fused": True},
    "foreach": {"foreach": True, "fused": False},
    "for-loop": {"foreach": False, "fused": False},
}
"""Which of torch's AdamW implementations -> what to tell torch. None leaves the choice to torch."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024; IsoLoCo App. B, MuLoCo) on named parameters, whole (plain tensors) or DTensors.

    A hidden matrix W (rows = outputs, columns = inputs, as ``nn.Linear`` keeps it) with gradient G, momentum M starting
    at zero, μ = ``momentum``:

    - M ← μM + G (a sum, no factor 1 − μ); U = M, or G + μM with ``nesterov=True``
    - O = :func:`~isoloco.newton_schulz.newton_schulz` of the whole matrix U, with ``coefficients`` and ``steps``
    - W ← (1 − lr · weight_decay) W, with the plain lr; then W ← W − lr · s · O

    ``scale`` chooses s: ``"spectral"`` √(rows / columns), ``"match_rms_adamw"`` 0.2 √max(rows, columns),
    ``"original"`` √max(1, rows / columns). A matrix whose momentum is zero gets no update.

    Every other parameter gets AdamW as in torch.optim.AdamW: with ``adamw_betas``, ``adamw_eps``, the same
    ``weight_decay`` and the learning rate lr · ``adamw_lr_factor``. These are tensors of other than two dims, matrices
    with a single row or column, and embeddings, heads and routers: recognised by name if ``adamw`` is None
    (:func:`~isoloco.matrix_role.matrix_role`), else whatever ``adamw`` names (names or patterns). What became of each
    parameter is logged once.

    Two kinds of tensors hold several matrices, and only where they are named so is each one orthogonalised by itself,
    with its own s: ``stacks`` names tensors (..., m, n) of three or more dims (experts); ``split_sizes`` maps a name or
    pattern to the numbers of rows of its blocks (q | k | v, gate | up).

    There is one parameter group and one ``lr``, which a schedule may set before each step. DTensors may be placed in
    any way but Partial; each matrix is brought whole to one of the ranks of its mesh, in transfers of at most about
    ``bucket_bytes``. So :meth:`step` is a collective: all ranks of a mesh must have gradients for the same parameters.
    Sharded and whole parameters get the same update, replicated ones the same bits on every rank.

    State and arithmetic are fp32 whatever the parameters' dtype (fp64 for fp64): ``momentum_buffer``, or AdamW's
    ``step``, ``exp_avg`` and ``exp_avg_sq``, placed like their parameter, complete on every rank from the start, also
    for parameters that never get a gradient; none for those with ``requires_grad=False``. A parameter without a
    gradient is left alone, decay included. A tied weight, given under several names, is one parameter.

    Whether gradients are finite is not looked at, as that would make the host wait for the device in every step: NaN or
    Inf in a gradient makes its whole matrix NaN, as AdamW would in the end. Watch the norm of the gradient.

    ValueError for options out of range, patterns that match nothing, split sizes that do not add up, and sparse
    gradients.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.01,
        scale: str = "spectral",
        coefficients: str = "dion",
        steps: int = 5,
        adamw: Sequence[str] | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_lr_factor: float = 1.0,
        adamw_implementation: str | None = None,
        split_sizes: Mapping[str, Sequence[int]] | None = None,
        stacks: Sequence[str] = (),
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        named = named_tensors(named_parameters)
        for what, value in (("lr", lr), ("weight_decay", weight_decay), ("adamw_lr_factor", adamw_lr_factor)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{what}={value}: expected a finite number, 0 or more")
        if len(adamw_betas) != 2:
            raise ValueError(f"adamw_betas={adamw_betas}: expected two numbers")
        for what, value in (("momentum", momentum), *(("adamw_betas", beta) for beta in adamw_betas)):
            if not 0 <= value < 1:
                raise ValueError(f"{what}={value}: expected at least 0 and less than 1")
        if not adamw_eps > 0:
            raise ValueError(f"adamw_eps={adamw_eps}: expected more than 0")
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown: use one of {', '.join(map(repr, SCALES))}")
        if adamw_implementation not in IMPLEMENTATIONS:
            known = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"adamw_implementation={adamw_implementation!r} is unknown: use one of {known}")
        self._triples = coefficient_triples(coefficients, steps)
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise ValueError(f"{name} is {parameter.dtype}: only floating-point parameters can be trained")

        self._names = {parameter: name for name, parameter in reversed(named)}  # of a tied weight, its first name
        self._matrices = _hidden_matrices(named, adamw, split_sizes or {}, stacks)
        self.nesterov = nesterov
        self.scale = scale
        self.adamw_lr_factor = adamw_lr_factor
        self.adamw_implementation = adamw_implementation
        self._engine = WholeMatrices(bucket_bytes=bucket_bytes, agree=False)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            list(dict.fromkeys(parameter for _, parameter in named)),
            defaults | {"betas": tuple(adamw_betas), "eps": adamw_eps},
        )
        self._complete_state()
        self._log_parameters()

    def reset_state(self) -> None:
        """Forget all gradients so far: momentum and moments are again as before the first step."""
        self.state.clear()
        self._complete_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError("a Muon has one group of parameters: give it all of them when it is made")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the gradients as they are in ``p.grad``. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            trained = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
            for parameter in trained:
                if parameter.grad.layout != torch.strided:
                    raise ValueError(f"{self._names[parameter]}: its gradient is sparse, and Muon needs dense ones")
            self._step_matrices([parameter for parameter in trained if parameter in self._matrices])
            self._step_others([parameter for parameter in trained if parameter not in self._matrices])
        return loss

    def _step_matrices(self, parameters: Sequence[Tensor]) -> None:
        group = self.param_groups[0]
        lr, mu, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        # Each product and each sum is a kernel of its own: a fused one rounds once or twice depending on where in
        # memory an element lies, and replicated parameters would drift apart.
        jobs = []
        for parameter in parameters:
            buffer = self._state_of(parameter)["momentum_buffer"]
            update = torch.empty_like(buffer)
            for M, G, U in chunks(local_part(buffer), _local_gradient(parameter), local_part(update)):
                M.mul_(mu).add_(G.to(M.dtype))
                if self.nesterov:
                    torch.mul(M, mu, out=U).add_(G.to(M.dtype))
            direction = update if self.nesterov else buffer
            jobs.append(Job(inputs=(direction,), output=update, key=self._matrices[parameter]))
        self._engine.apply(
            jobs, lambda numbers, stacks: self._scaled_factors(stacks[0], self._matrices[parameters[numbers[0]]])
        )
        for parameter, job in zip(parameters, jobs, strict=True):
            for weight, update in chunks(local_part(parameter), local_part(job.output)):
                weight.copy_(weight.to(update.dtype).mul_(1 - lr * decay).sub_(update.mul_(lr)))

    def _scaled_factors(self, stack: Tensor, blocks: SplitSizes) -> Tensor:
        """s · NS of each matrix (..., m, n), which is scratch, each of the ``blocks`` of its rows by itself.

        It is the public function without the check for NaN and Inf, which spread over their matrix and to no other.
        """
        result = torch.empty_like(stack)
        rows = blocks or (stack.shape[-2],)
        for block, into in zip(stack.split(rows, dim=-2), result.split(rows, dim=-2), strict=True):
            s = SCALES[self.scale](*block.shape[-2:])
            for unit, factor in zip(independent(block), independent(into), strict=True):
                largest = torch.linalg.vector_norm(unit, ord=math.inf, dim=(-2, -1), keepdim=True)
                unit.div_(torch.where(largest > 0, largest, 1))  # so that no square overflows or vanishes
                divide_by_norm(unit)
                factor.copy_(orthogonalize(unit, self._triples).matrix).mul_(s)
        return result

    def _step_others(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        group = self.param_groups[0]
        states = [self._state_of(parameter) for parameter in parameters]
        dtypes = [state_dtype(parameter) for parameter in parameters]
        # Of narrower parameters copies, to be rounded once, at the end; of others their own memory.
        weights = [local_part(parameter).to(dtype) for parameter, dtype in zip(parameters, dtypes, strict=True)]
        adamw_update(
            weights,
            [_local_gradient(parameter).to(dtype) for parameter, dtype in zip(parameters, dtypes, strict=True)],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=IMPLEMENTATIONS[self.adamw_implementation]["foreach"],
            fused=IMPLEMENTATIONS[self.adamw_implementation]["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]) * self.adamw_lr_factor,
            weight_decay=float(group["weight_decay"]),
            eps=group["eps"],
            maximize=False,
        )
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight.dtype != parameter.dtype:
                local_part(parameter).copy_(weight)

    # ---- state ----

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, which is made anew if somebody cleared it."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            if parameter in self._matrices:
                state["momentum_buffer"] = zero_state(parameter)
            else:
                on_device = self.adamw_implementation == "fused"  # where torch's fused kernel wants it
                state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu", dtype=torch.float32)
                state["exp_avg"] = zero_state(parameter)
                state["exp_avg_sq"] = zero_state(parameter)
        return state

    def _complete_state(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.requires_grad:
                self._state_of(parameter)

    def state_dict(self) -> dict[str, Any]:
        """As of any torch optimizer, with the state of every trained parameter, whether it got a gradient or not."""
        self._complete_state()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # for copies: torch's own leaves out what it does not know

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same parameters in the same order, bit for bit, into the tensors that are here.

        Learning rate, momentum, decay, betas and eps come from it too. Raises ValueError, before anything is changed,
        if it lacks the state of a parameter that is trained here, or has state of another kind for it.
        """
        self._complete_state()
        parameters = self.param_groups[0]["params"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = {
            parameter: state_dict["state"].get(number, {})
            for parameter, number in zip(parameters, numbers, strict=False)  # torch compares the lengths
        }
        own = {
            parameter: self._state_of(parameter) for parameter in saved if parameter.requires_grad or saved[parameter]
        }
        for parameter, state in own.items():
            if missing := state.keys() - saved[parameter].keys():
                found = ", ".join(sorted(saved[parameter])) or "nothing"
                raise ValueError(
                    f"the saved optimizer state has no {', '.join(sorted(missing))} for {self._names[parameter]} "
                    f"(it has {found}): it is of other parameters, of another optimizer or of another choice for AdamW"
                )
            for key, tensor in state.items():
                found_shape = torch.as_tensor(saved[parameter][key]).shape
                if found_shape != tensor.shape:
                    shapes = f"{tuple(found_shape)} instead of {tuple(tensor.shape)}"
                    raise ValueError(f"the saved {key} of {self._names[parameter]} has the shape {shapes}")
        super().load_state_dict(state_dict)
        # torch casts what it loads to the dtype of the parameter, which loses bits of fp32 state, and shares memory
        # with the state dict: the saved tensors are copied once more, from the source.
        self.state.clear()
        for parameter, state in own.items():
            for key, tensor in state.items():
                tensor.copy_(torch.as_tensor(saved[parameter][key]))
            self.state[parameter] = state

    def _log_parameters(self) -> None:
        parameters = self.param_groups[0]["params"]
        num_matrices = sum(
            math.prod(parameter.shape[:-2]) * len(blocks or [None]) for parameter, blocks in self._matrices.items()
        )
        # layers.0.norm.weight, layers.1.norm.weight, ... are one entry
        others = Counter(
            re.sub(r"(?<![^.])\d+(?![^.])", "*", self._names[parameter])
            for parameter in parameters
            if parameter not in self._matrices
        )
        listed = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in others.items()) or "none"
        logger.info(
            "Muon: %d matrices in %d parameters are orthogonalised; AdamW updates %d parameters: %s",
            num_matrices,
            len(self._matrices),
            others.total(),
            listed,
        )


def _hidden_matrices(
    named: Sequence[tuple[str, Tensor]],
    adamw: Sequence[str] | None,
    split_sizes: Mapping[str, Sequence[int]],
    stacks: Sequence[str],
) -> dict[Tensor, SplitSizes]:
    """Every parameter that is orthogonalised -> the rows of its blocks."""
    parameters = dict(named)
    names = list(parameters)
    if adamw is None:
        chosen = {name for name in names if parameters[name].dim() == 2 and matrix_role(name, names) != "hidden"}
    else:
        chosen = matching_names(names, adamw, option="adamw")
    for_adamw = {parameters[name] for name in chosen}  # a tied weight goes there under any of its names
    exclude = [name for name in names if parameters[name] in for_adamw]
    found = matrices(parameters, exclude=exclude, split_sizes=split_sizes, stacks=stacks)
    for option, patterns in (("stacks", stacks), ("split_sizes", list(split_sizes))):
        for name in sorted(matching_names(names, patterns, option=option) - found.keys()):
            shape = tuple(parameters[name].shape)
            raise ValueError(f"{option}: {name} of shape {shape} is no hidden matrix: AdamW updates it as it is")
    return {parameters[name]: blocks for name, blocks in found.items()}


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, placed like the parameter."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        # tensor parallelism alone leaves the sum over the ranks to whoever uses the gradient
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)
