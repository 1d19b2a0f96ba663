"""The outer optimizer: what is done to the reference parameters with the averaged pseudo-gradient of a round."""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.isotropic import check_isotropic_options, isotropic
from isoloco.whole_matrix import apply_to_whole

Observer = Callable[[str, Tensor, Tensor], None]
"""Is shown a matrix's name and the whole matrix before and after its correction; must leave both as they are."""

MOMENTUM_KINDS = ("nesterov", "momentum", "heavy_ball")
TARGETS = ("gradient", "update")


def excluded_names(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The ``names`` that equal or match (as file-name patterns: ``*``, ``?``, ``[...]``) one of ``patterns``.

    A pattern without any match is a mistake, and a silent one would train something else than was asked for:
    ValueError, with the nearest names.
    """
    if isinstance(patterns, str):
        raise ValueError(f"exclude={patterns!r}: expected a sequence of names or patterns, such as [{patterns!r}]")
    excluded: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matches:
            nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"exclude: {pattern!r} matches no parameter; nearest: {', '.join(nearest)}")
        excluded |= matches
    return excluded


class OuterOptimizer(torch.optim.Optimizer):
    """DiLoCo's and IsoLoCo's outer step on named parameters, whole (plain tensors) or sharded (DTensors).

    ``p.grad`` holds the averaged pseudo-gradient Δ = θ_old − mean(θ_i): descent sign, the step subtracts. With μ =
    ``momentum`` and η = ``lr``, momentum B starting at zero:

    - ``momentum_kind="nesterov"`` (DiLoCo): B ← μB + Δ; P = Δ + μB; θ ← θ − ηP
    - ``"momentum"``: B ← μB + Δ; P = B; θ ← θ − ηP
    - ``"heavy_ball"`` (learning rate inside): B ← μB − ηΔ; θ ← θ + B

    ``momentum=0`` is plain SGD and has no state. ``isotropic``: None is DiLoCo; ``"svd"`` and ``"newton_schulz"`` are
    IsoLoCo (Algorithm 2 and section 4.3) with ``scale``, ``clip`` and ``coefficients`` as in
    :func:`~isoloco.isotropic.isotropic`. It is applied to every tensor of exactly two dims, both larger than one, that
    ``exclude`` (names or patterns) leaves in; to Δ before momentum (``target="gradient"``) or to P after it
    (``"update"``); always to whole matrices, so it is a collective over the mesh of the DTensors.

    State and arithmetic are fp32 (fp64 for fp64 parameters), multiplication and addition rounded separately, so that
    all machines compute the same bits. The state exists from the start and is placed like its parameter. Parameters
    without a gradient are left alone. ValueError for options out of range, and for a "non-finite" pseudo-gradient
    before anything is changed by it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        lr: float,
        momentum: float = 0.9,
        momentum_kind: str = "nesterov",
        isotropic: str | None = None,
        scale: str = "mean",
        clip: str | None = None,
        target: str = "gradient",
        exclude: Sequence[str] = (),
        coefficients: str = "dion",
    ) -> None:
        named = list(named_parameters)
        names = [name for name, _ in named]
        if len(set(names)) != len(names):
            raise ValueError("a parameter name is given twice: every parameter needs its own")
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"lr={lr}: the outer learning rate is a finite number, 0 or more")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: the outer momentum is at least 0 and below 1")
        if momentum_kind not in MOMENTUM_KINDS:
            raise ValueError(f"momentum_kind={momentum_kind!r} is unknown: use one of {MOMENTUM_KINDS}")
        if target not in TARGETS:
            raise ValueError(f"target={target!r} is unknown: use one of {TARGETS}")
        check_isotropic_options("svd" if isotropic is None else isotropic, scale, clip, coefficients)
        excluded = excluded_names(names, exclude)

        super().__init__(named, {"lr": lr, "momentum": momentum})
        self.momentum_kind = momentum_kind
        self.orthogonalizer = isotropic
        self.scale = scale
        self.clip = clip
        self.target = target
        self.coefficients = coefficients
        self._named = named
        self._isotropic_names = {
            name
            for name, parameter in named
            if isotropic is not None and name not in excluded and parameter.dim() == 2 and min(parameter.shape) > 1
        }
        if momentum != 0:
            for _, parameter in named:
                self.state[parameter]["momentum_buffer"] = _zero_buffer(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError("an OuterOptimizer has one group of parameters: give it all of them when it is made")
        super().add_param_group(param_group)

    def _corrected(self, name: str, matrix: Tensor, observe: Observer | None = None) -> Tensor:
        def correct(whole: Tensor) -> Tensor:
            assert self.orthogonalizer is not None
            corrected = isotropic(
                whole,
                orthogonalizer=self.orthogonalizer,
                scale=self.scale,
                clip=self.clip,
                coefficients=self.coefficients,
            )
            if observe is not None:
                observe(name, whole, corrected)
            return corrected

        try:
            return apply_to_whole(matrix, correct)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @torch.no_grad()
    def correct_gradients(self, observe: Observer | None = None) -> None:
        """Check every pseudo-gradient and, for ``target="gradient"``, replace those of matrices by isotropic ones.

        ``observe`` is called for each matrix that is replaced.
        """
        for name, parameter in self._named:
            if parameter.grad is None:
                continue
            if self.target == "gradient" and name in self._isotropic_names:
                parameter.grad = self._corrected(name, parameter.grad, observe)
            elif not bool(torch.isfinite(_local(parameter.grad)).all()):
                raise ValueError(f"{name}: non-finite values in the pseudo-gradient")

    @torch.no_grad()
    def apply(self) -> None:
        """Momentum and the parameter update, with the pseudo-gradients as they are in ``p.grad``."""
        group = self.param_groups[0]
        lr, momentum = float(group["lr"]), float(group["momentum"])
        for name, parameter in self._named:
            if parameter.grad is None:
                continue
            # Each product and each sum is a kernel of its own. Fused forms (alpha=, addcmul, lerp) round once or twice
            # depending on the device, and groups on different machines would drift apart.
            delta = parameter.grad.to(_state_dtype(parameter))
            update = delta
            if momentum != 0:
                buffer = self.state[parameter]["momentum_buffer"]
                buffer.mul_(momentum)
                if self.momentum_kind == "heavy_ball":
                    buffer.sub_(delta.mul(lr))
                    update = buffer.neg()
                else:
                    buffer.add_(delta)
                    update = buffer.mul(momentum).add_(delta) if self.momentum_kind == "nesterov" else buffer
            if self.target == "update" and name in self._isotropic_names:
                update = self._corrected(name, update)
            if momentum == 0 or self.momentum_kind != "heavy_ball":
                update = update.mul(lr)
            parameter.copy_(parameter.to(update.dtype).sub(update))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One outer step: :meth:`correct_gradients`, then :meth:`apply`. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.correct_gradients()
        self.apply()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same parameters in the same order (ValueError if the names differ).

        Learning rate and momentum come from it too. The values are copied into this optimizer's own buffers.
        """
        saved_group = state_dict["param_groups"][0]
        names = [name for name, _ in self._named]
        if saved_group.get("param_names", names) != names:
            odd = sorted(set(saved_group["param_names"]) ^ set(names)) or ["the same names in another order"]
            raise ValueError(f"the outer state belongs to other parameters: {', '.join(odd[:5])}")
        buffers = {parameter: self.state.get(parameter, {}).get("momentum_buffer") for _, parameter in self._named}
        super().load_state_dict(state_dict)
        # torch casts loaded state to the dtype of the parameter, which loses bits of an fp32 buffer, and shares memory
        # with the state dict: the saved tensors are copied once more, from the source.
        for index, (_, parameter) in zip(saved_group["params"], self._named, strict=True):
            saved = state_dict["state"].get(index, {}).get("momentum_buffer")
            if saved is None:
                self.state.pop(parameter, None)
                continue
            buffer = buffers[parameter]
            if buffer is None:
                buffer = _zero_buffer(parameter)
            buffer.copy_(saved)
            self.state[parameter]["momentum_buffer"] = buffer


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _zero_buffer(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=_state_dtype(parameter), requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
