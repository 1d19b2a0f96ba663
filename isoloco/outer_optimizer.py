"""The outer optimizer: what is done to the reference parameters with the averaged pseudo-gradient of a round."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from isoloco.isotropic import ORTHOGONALIZERS, check_isotropic_options, make_isotropic
from isoloco.local_part import chunks, is_finite, local_part
from isoloco.optimizer_state import state_dtype, zero_state
from isoloco.parameter_names import matrices, named_tensors
from isoloco.whole_matrix import Job, WholeMatrices

MOMENTUM_KINDS = ("nesterov", "momentum", "heavy_ball")
TARGETS = ("gradient", "update")


class NonFiniteError(ValueError):
    """A pseudo-gradient holds NaN or Inf: it has no direction, and must not get into the momentum."""


class OuterOptimizer(torch.optim.Optimizer):
    """DiLoCo's and IsoLoCo's outer step on named parameters, whole (plain tensors) or sharded (DTensors).

    ``p.grad`` holds the averaged pseudo-gradient Δ = θ_old − mean(θ_i): descent sign, the step subtracts. With μ =
    ``momentum`` and η = ``lr``, momentum B starting at zero:

    - ``momentum_kind="nesterov"`` (DiLoCo): B ← μB + Δ; P = Δ + μB; θ ← θ − ηP
    - ``"momentum"``: B ← μB + Δ; P = B; θ ← θ − ηP
    - ``"heavy_ball"`` (learning rate inside): B ← μB − ηΔ; P = −B; θ ← θ − P

    ``momentum=0`` is plain SGD and has no state. ``isotropic``: None is DiLoCo (the options below have no effect then);
    ``"svd"`` and ``"newton_schulz"`` are IsoLoCo (Algorithm 2 and section 4.3) with ``scale``, ``clip`` and
    ``coefficients`` as in :func:`~isoloco.isotropic.isotropic`. It is applied to every tensor of exactly two dims, both
    larger than one, that ``exclude`` (names or patterns) leaves in, and to those of more dims that ``stacks`` (names or
    patterns) declares to be stacks (..., m, n) of independent matrices. ``split_sizes`` (name or pattern -> rows of
    each block) declares fused matrices such as q|k|v, whose blocks are matrices of their own. It is applied to Δ before
    momentum (``target="gradient"``) or to P after it (``"update"``); always to whole matrices, each on the one rank
    that owns it (:class:`~isoloco.whole_matrix.WholeMatrices`), so it is a collective over the meshes of the DTensors.

    State and arithmetic are fp32 (fp64 for fp64 parameters), multiplication and addition rounded separately, so that
    all machines compute the same bits. The state exists from the start and is placed like its parameter: parameters on
    the host keep all of it there, and matrices visit ``device`` (None: that of their mesh or, of plain tensors, their
    own) in batches that with their result take at most ``bucket_bytes``, or one matrix if that is more. Parameters
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
        split_sizes: Mapping[str, Sequence[int]] | None = None,
        stacks: Sequence[str] = (),
        bucket_bytes: int = 256 * 2**20,
        device: torch.device | None = None,
    ) -> None:
        named = named_tensors(named_parameters)
        first_name = {parameter: name for name, parameter in reversed(named)}
        for name, parameter in named:
            if first_name[parameter] != name:
                raise ValueError(
                    f"{first_name[parameter]!r} and {name!r} are one tensor, which would be stepped twice: "
                    "give it once, as model.named_parameters() does"
                )
        if isotropic not in (None, *ORTHOGONALIZERS):
            raise ValueError(f"isotropic={isotropic!r} is unknown: use None, {', '.join(map(repr, ORTHOGONALIZERS))}")
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"lr={lr}: the outer learning rate is a finite number, 0 or more")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: the outer momentum is at least 0 and below 1")
        if momentum_kind not in MOMENTUM_KINDS:
            raise ValueError(f"momentum_kind={momentum_kind!r} is unknown: use one of {MOMENTUM_KINDS}")
        if target not in TARGETS:
            raise ValueError(f"target={target!r} is unknown: use one of {TARGETS}")
        check_isotropic_options("svd" if isotropic is None else isotropic, scale, clip, coefficients)
        chosen = matrices(dict(named), exclude=exclude, split_sizes=split_sizes, stacks=stacks)

        super().__init__(named, {"lr": lr, "momentum": momentum})
        self.momentum_kind = momentum_kind
        self.orthogonalizer = isotropic
        self.scale = scale
        self.clip = clip
        self.target = target
        self.coefficients = coefficients
        self.split_sizes = chosen if isotropic is not None else {}
        """Of every matrix that is made isotropic, the rows of its blocks (None: it is one)."""
        self.whole_matrices = WholeMatrices(bucket_bytes=bucket_bytes, device=device)
        self._named = dict(named)
        self._updates: dict[str, Tensor] = {}  # target "update": isotropic P of matrices, until it is applied
        if momentum != 0:
            for parameter in self._named.values():
                self.state[parameter]["momentum_buffer"] = zero_state(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError("an OuterOptimizer has one group of parameters: give it all of them when it is made")
        super().add_param_group(param_group)

    @torch.no_grad()
    def first_non_finite(self) -> str | None:
        """The first parameter whose pseudo-gradient holds NaN or Inf on any rank; None if all are finite.

        A collective over the meshes of the DTensors; all ranks learn the same name. ValueError, on all of them, for a
        parameter that has a pseudo-gradient on some ranks only, or a sparse one.
        """
        findings = torch.zeros(4, len(self._named), dtype=torch.int32)  # finite, present, absent, dense: 1 or 0
        for number, gradient in enumerate(parameter.grad for parameter in self._named.values()):
            dense = gradient is None or gradient.layout == torch.strided
            finite = gradient is None or not dense or is_finite(gradient)
            findings[:, number] = torch.tensor([finite, gradient is not None, gradient is None, dense])
        for mesh in dict.fromkeys(p.device_mesh for p in self._named.values() if isinstance(p, DTensor)):
            on_mesh = findings.to(mesh.device_type)
            for group in mesh.get_all_groups():  # along each axis in turn: over the whole mesh
                dist.all_reduce(on_mesh, op=dist.ReduceOp.MIN, group=group)
            findings = on_mesh.cpu()
        for name, (_, present, absent, dense) in zip(self._named, findings.T.tolist(), strict=True):
            if not present and not absent:
                raise ValueError(f"{name} has a pseudo-gradient on some ranks and none on others: all need the same")
            if not dense:
                raise ValueError(f"{name}: its pseudo-gradient is sparse, and the outer step needs dense ones")
        return next((name for name, flag in zip(self._named, findings[0].tolist(), strict=True) if not flag), None)

    @torch.no_grad()
    def correct(self, names: Iterable[str] | None = None) -> dict[str, tuple[float, float]]:
        """Make the matrices among ``names`` (None: all) isotropic, each on the one rank that owns it.

        With ``target="gradient"`` their ``p.grad`` is replaced, with ``"update"`` the update that :meth:`apply` will
        use is computed and kept; parameters and momentum stay as they are. Returns the stable rank before and after
        (of stacks and blocks the mean) of the matrices that this rank has worked on. Raises NonFiniteError, on all
        ranks, for a "non-finite" pseudo-gradient of any parameter, before anything is changed.
        """
        if (bad := self.first_non_finite()) is not None:
            raise NonFiniteError(f"{bad}: non-finite values in the pseudo-gradient")
        wanted = self._named if names is None else set(names)
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None and name in wanted}
        chosen = [name for name in self.split_sizes if name in gradients]
        if self.target == "update":
            self._updates |= {name: self._update(name) for name in chosen}
        tensors = self._updates if self.target == "update" else gradients
        stable_ranks: dict[str, tuple[float, float]] = {}

        def make_batch_isotropic(numbers: list[int], stacks: list[Tensor]) -> Tensor:
            (batch,) = stacks  # (B, ..., m, n)
            assert self.orthogonalizer is not None
            made = make_isotropic(
                batch,
                orthogonalizer=self.orthogonalizer,
                scale=self.scale,
                clip=self.clip,
                coefficients=self.coefficients,
                split_sizes=self.split_sizes[chosen[numbers[0]]],
                overwrite=True,
                with_stable_rank=True,
            )
            assert made.stable_rank_before is not None
            assert made.stable_rank_after is not None
            both = torch.stack((made.stable_rank_before, made.stable_rank_after))  # (2, B, ...)
            pairs = both.reshape(2, len(numbers), -1).mean(-1).T.tolist()
            stable_ranks.update((chosen[number], tuple(pair)) for number, pair in zip(numbers, pairs, strict=True))
            return made.matrix

        jobs = [Job((tensors[name],), tensors[name], key=self.split_sizes[name]) for name in chosen]
        self.whole_matrices.apply(jobs, make_batch_isotropic)
        return stable_ranks

    def _update(self, name: str) -> Tensor:
        """P of a matrix as it will be before its correction; the momentum stays as it is."""
        parameter = self._named[name]
        assert parameter.grad is not None
        lr, momentum = self._rates()
        update = zero_state(parameter)
        parts = [local_part(update), local_part(parameter.grad)]
        if momentum != 0:
            parts.append(local_part(self.state[parameter]["momentum_buffer"]))
        for into, delta, *buffers in chunks(*parts):
            into.copy_(self._momentum_step(delta.to(into.dtype), [buffer.clone() for buffer in buffers], lr, momentum))
        return update

    def _momentum_step(self, delta: Tensor, buffers: Sequence[Tensor], lr: float, momentum: float) -> Tensor:
        """P of Δ, after the momentum in ``buffers`` (one tensor, or none without momentum) has taken in Δ."""
        # Each product and each sum is a kernel of its own. Fused forms (alpha=, addcmul, lerp) round once or twice
        # depending on the device, and groups on different machines would drift apart.
        if not buffers:
            return delta
        (buffer,) = buffers
        buffer.mul_(momentum)
        if self.momentum_kind == "heavy_ball":
            buffer.sub_(delta.mul(lr))
            return buffer.neg()
        buffer.add_(delta)
        return buffer.mul(momentum).add_(delta) if self.momentum_kind == "nesterov" else buffer

    @torch.no_grad()
    def apply(self) -> None:
        """Momentum and the parameter update, with the pseudo-gradients as they are; elementwise, no communication.

        With ``target="update"`` the matrices need their isotropic updates: :meth:`correct` comes first.
        """
        lr, momentum = self._rates()
        lr_is_inside = self.momentum_kind == "heavy_ball" and momentum != 0
        for name, parameter in self._named.items():
            if parameter.grad is None:
                continue
            dtype = state_dtype(parameter)
            parts = [local_part(parameter), local_part(parameter.grad)]
            if momentum != 0:
                parts.append(local_part(self.state[parameter]["momentum_buffer"]))
            is_corrected = self.target == "update" and name in self.split_sizes
            if is_corrected:
                parts.append(local_part(self._updates.pop(name)))
            for values, delta, *rest in chunks(*parts):
                corrected = [rest.pop()] if is_corrected else []
                update = self._momentum_step(delta.to(dtype), rest, lr, momentum)
                update = corrected[0] if corrected else update
                values.copy_(values.to(dtype).sub(update if lr_is_inside else update.mul(lr)))

    def _rates(self) -> tuple[float, float]:
        group = self.param_groups[0]
        return float(group["lr"]), float(group["momentum"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One outer step: :meth:`correct`, then :meth:`apply`. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.correct()
        self.apply()
        return loss

    def updates(self, names: Iterable[str]) -> list[Tensor]:
        """Where :meth:`apply` finds the isotropic updates of these matrices (``target="update"``); zeros if new.

        For those that another replica group has computed: write them there.
        """
        for name in names:
            if name not in self._updates:
                self._updates[name] = zero_state(self._named[name])
        return [self._updates[name] for name in names]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # for copies: torch's own leaves out what it does not know

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same parameters in the same order, bit for bit, into the buffers that are here.

        Learning rate and momentum come from it too. ValueError, before anything is changed, if names or shapes differ
        or the momentum of a parameter is missing.
        """
        saved_group = state_dict["param_groups"][0]
        names = list(self._named)
        if saved_group.get("param_names", names) != names:
            odd = sorted(set(saved_group["param_names"]) ^ set(names)) or ["the same names in another order"]
            raise ValueError(f"the outer state belongs to other parameters: {', '.join(odd[:5])}")
        buffers = {p: self.state.get(p, {}).get("momentum_buffer") for p in self._named.values()}
        if saved_group["momentum"] != 0:
            for index, (name, parameter) in zip(saved_group["params"], self._named.items(), strict=True):
                saved = state_dict["state"].get(index, {}).get("momentum_buffer")
                if saved is None:
                    raise ValueError(f"the saved outer state has no momentum for {name}, so it is incomplete")
                if saved.shape != parameter.shape:
                    shapes = f"{tuple(saved.shape)}, but the parameter {tuple(parameter.shape)}"
                    raise ValueError(f"the saved momentum of {name} has the shape {shapes}")
        super().load_state_dict(state_dict)
        # torch casts loaded state to the dtype of the parameter, which loses bits of an fp32 buffer, and shares memory
        # with the state dict: the saved tensors are copied once more, from the source.
        for index, parameter in zip(saved_group["params"], self._named.values(), strict=True):
            saved = state_dict["state"].get(index, {}).get("momentum_buffer")
            if saved is None:
                self.state.pop(parameter, None)
                continue
            buffer = buffers[parameter]
            if buffer is None:
                buffer = zero_state(parameter)
            buffer.copy_(saved)
            self.state[parameter]["momentum_buffer"] = buffer
