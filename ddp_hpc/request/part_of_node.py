"""Jobs that request a part of a node at a site where jobs usually get whole nodes."""

from __future__ import annotations

from dataclasses import replace

from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, without_variables

# With these options, a job gets or needs a whole node.
_WHOLE_NODE = ("--mem", "--exclusive")
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def part_of_node(job: Job, site: Site) -> Site:
    """Returns the site for a job that requests fewer GPUs than a node has, in a queue with shared nodes.

    The scheduler then chooses the cores and GPUs, so those that the profile binds ranks to are not used. If
    the job requests whole nodes, or a queue without shared nodes, `site` itself is returned.
    """
    node = site.node
    queues = tuple(queue for queue in site.queues if queue.shared and job.queue in ("", queue.name))
    if not (job.gpus_per_node and job.gpus_per_node < node.devices and queues):
        return site
    names = [queue.name for queue in queues]
    cores = node.cores // node.devices
    threads = (node.threads or node.cores) // node.devices
    return replace(
        site,
        queues=queues,
        default_queue=site.default_queue if site.default_queue in names else names[0],
        node=replace(node, cores=0, threads=0, devices=0, cores_per_device=cores, threads_per_device=threads),
        slurm=replace(
            site.slurm,
            options=_without(_WHOLE_NODE, site.slurm.options),
            srun_options=_without(("--cpu-bind",), site.slurm.srun_options),
        ),
        launch=replace(site.launch, cpu_bind=(), wrap=_without_devices(site.launch.wrap)),
        container=replace(site.container, command=_without_devices(site.container.command)),
        # The scheduler may only show the job its own GPUs by these variables.
        env=replace(
            without_variables(site.env, _VISIBLE_DEVICES),
            unset=tuple(name for name in site.env.unset if name not in _VISIBLE_DEVICES),
        ),
        why={name: why for name, why in site.why.items() if name not in (*_VISIBLE_DEVICES, "cpu_bind")},
    )


def _without_devices(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a command without `CUDA_VISIBLE_DEVICES=...` and the like, which follow `env`."""
    words = tuple(word for word in command if word.partition("=")[0] not in _VISIBLE_DEVICES)
    return words[1:] if words[:1] == ("env",) and "=" not in "".join(words[1:2]) else words


def _without(names: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for option in options if option.partition("=")[0] not in names)
