"""Parameters in bfloat16 with float32 copies (master weights), and Adam's moments in bfloat16.

Megatron-LM, DeepSpeed's BF16_Optimizer and TransformerEngine's FusedAdam do the same: they update float32
copies of the parameters, and convert moments to float32 for the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.utils._pytree import tree_map

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.snapshots.dtensor_shards import local_shard

Masters = Mapping[Tensor, nn.Parameter]
"""The float32 copy of each converted parameter."""

# An update converts at most this number of values at once, which limits its temporary memory to 64 MiB for
# the gradients and for each moment, unless one parameter is larger.
_MOST_VALUES = 2**24
_ALIGNMENT = 32  # in values, so that kernels can read several values at once


class _Float32Update(torch.optim.Adam):
    """Adam that computes in float32 whatever the data types of gradients and moments.

    Args:
        params: the parameters to update, in float32, or groups of them.
        moment_dtype: the data type in which the moments are stored.
        trained: maps each float32 copy in `params` to the parameter of the model, which has the gradient and
            is overwritten with the updated copy. Empty if `params` are the model's own parameters.
        options: the arguments of torch.optim.Adam.
    """

    def __init__(
        self,
        params: Any,
        *,
        moment_dtype: torch.dtype = torch.float32,
        trained: Mapping[nn.Parameter, Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._moment_dtype = moment_dtype
        self._trained = trained or {}
        self.grad_factor: Tensor | None = None
        """Multiplies the gradients of the next update, after their conversion to float32."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients."""
        super().zero_grad(set_to_none)
        for parameter in self._trained.values():
            parameter.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state, and converts the moments to their data type; torch would make them float32."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                state[key] = state[key].to(self._moment_dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            for bucket in self._buckets(group["params"]):
                self._update(bucket, group)
        self.grad_factor = None

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yields parameters that can be updated together, with at most `_MOST_VALUES` values if possible."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            trained = self._trained.get(parameter, parameter)
            if trained.grad is not None:
                alike.setdefault((parameter.device, trained.dtype), []).append(parameter)
        for parameters_alike in alike.values():
            bucket: list[nn.Parameter] = []
            num = 0
            for parameter in parameters_alike:
                size = local_shard(parameter).numel()
                if bucket and num + size > _MOST_VALUES:
                    yield bucket
                    bucket, num = [], 0
                bucket.append(parameter)
                num += size
            yield bucket

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter, group) for parameter in parameters]
        weights = [local_shard(parameter) for parameter in parameters]
        trained = [self._trained.get(parameter, parameter) for parameter in parameters]
        grads = [local_shard(parameter.grad) for parameter in trained if parameter.grad is not None]
        stored = [[local_shard(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")]
        if grads[0].dtype != torch.float32:
            _, grads = _in_float32(grads, stored[0])
        if self.grad_factor is not None:
            torch._foreach_mul_(grads, self.grad_factor.to(grads[0]))
        steps = [state["step"] for state in states]
        if self._moment_dtype == torch.float32:
            self._compute(weights, grads, stored[0], stored[1], steps, group)
        else:
            _, exp_avgs = _in_float32(stored[0], stored[0])
            flat, exp_avg_sqs = _in_float32(stored[1], stored[1])
            self._compute(weights, grads, exp_avgs, exp_avg_sqs, steps, group)
            _round_up_or_down(flat, steps[0])
            torch._foreach_copy_(stored[0], exp_avgs)
            torch._foreach_copy_(stored[1], exp_avg_sqs)
        if trained[0] is not parameters[0]:
            torch._foreach_copy_(trained, weights)

    def _state_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # As in torch's Adam, the step count is on the device if a kernel reads it, else on the CPU.
            device = parameter.device if group["fused"] or group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=self._moment_dtype)
        return state

    def _compute(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        group: dict[str, Any],
    ) -> None:
        """Calls torch's implementation, in one pass over memory if it is fused."""
        beta1, beta2 = group["betas"]
        compute = adamw if isinstance(self, torch.optim.AdamW) else adam
        compute(
            weights, grads, exp_avgs, exp_avg_sqs, [], steps,
            foreach=not group["fused"],
            fused=bool(group["fused"]),
            capturable=group["capturable"],
            # GradScaler sets these two, with which a fused update skips non-finite gradients.
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip


# Snapshots contain the class name of the optimizer. These classes have the same names as those of torch, so a
# run can resume with or without master weights.
class Adam(_Float32Update):
    """torch.optim.Adam with master weights, or with moments in bfloat16."""


class AdamW(_Float32Update, torch.optim.AdamW):
    """torch.optim.AdamW with master weights, or with moments in bfloat16."""


def _in_float32(tensors: list[Tensor], layouts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns a flat tensor, and float32 copies of the tensors, which are views of it.

    `layouts` are tensors of the same shapes that are dense in memory, but not necessarily contiguous.
    """
    starts = [0]
    for tensor in layouts:
        starts.append(starts[-1] + -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT)
    flat = torch.empty(starts[-1], dtype=torch.float32, device=tensors[0].device)
    copies = [
        flat.as_strided(tensor.shape, tensor.stride(), start)
        for tensor, start in zip(layouts, starts[:-1], strict=True)
    ]
    torch._foreach_copy_(copies, tensors)
    return flat, copies


def _round_up_or_down(flat: Tensor, step: Tensor) -> None:
    """Rounds to values of bfloat16: up with a frequency equal to the fraction that is cut off, else down.

    The second moment decays by 0.1 % per step, which is less than half of the distance between two values of
    bfloat16: rounded to the nearest value, it would never decrease. Stochastic rounding
    (https://arxiv.org/abs/2010.06192) does not have this bias. A sequence with low discrepancy, multiples of
    the golden ratio, is used instead of random numbers: it causes smaller errors, and it is the same on all
    ranks and after a restart.
    """
    offset = (step.to(torch.int64) * 40503 % 65536).to(torch.int32)
    flat.view(torch.int32).add_(offset).bitwise_and_(-65536)


def to_bf16(model: nn.Module) -> dict[Tensor, nn.Parameter]:
    """Converts a model in float32 to bfloat16 in place; returns the float32 copies of its parameters.

    Inputs are then converted, too, and outputs are converted to float32, so that a loss is computed in
    float32. Batch norms stay in float32, as with Apex, because running means lose small increments.
    """
    masters: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter not in masters:
                masters[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                parameter.data = parameter.detach().to(torch.bfloat16)
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.detach().to(torch.bfloat16)
    model.register_forward_pre_hook(_inputs_to_bf16, with_kwargs=True)
    model.register_forward_hook(_output_to_float32)
    return masters


def copy_masters(masters: Masters) -> None:
    """Overwrites the parameters with their float32 copies."""
    if masters:
        with torch.no_grad():
            torch._foreach_copy_(list(masters), list(masters.values()))


def check_float32(model: nn.Module, option: str) -> None:
    """Raises RequestError if a parameter is not in float32."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise RequestError(
                f"{option} bf16 needs a model in float32, but {name} is {dtype}; use data in float32 "
                f"(--dtype float32), or omit {option}"
            )


def _inputs_to_bf16(module: nn.Module, args: Any, kwargs: Any) -> Any:
    del module
    return tree_map(_to_bf16, (args, kwargs))


def _output_to_float32(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    return tree_map(_to_float32, output)


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
