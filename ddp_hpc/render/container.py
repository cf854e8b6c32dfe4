"""Renders the words that start the program of each rank in a container, as the profile defines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.base.errors import RequestError
from ddp_hpc.render.shell_quoting import Raw, Word, sh
from ddp_hpc.request.job import Job
from ddp_hpc.sites.site import Site, without_variables


def site_for_container(job: Job, site: Site) -> Site:
    """Returns `site` with the software and the variables of jobs with this container, or without one.

    Raises:
        RequestError: the profile does not define how to start containers.
    """
    if not job.container:
        return site
    container = site.container
    if not container.command:
        raise RequestError(
            f"--container was given, but profile {site.name} does not define how to start containers. Add "
            'a table [container] with command = ["apptainer", "exec", "--nv", "{image}"] or similar to a '
            "profile of your own."
        )
    env = without_variables(site.env, container.without)
    return replace(site, software=(*site.software, *container.software), env=env)


def container_words(job: Job, site: Site, launcher: Sequence[Word]) -> tuple[list[Word], list[Word]]:
    """Returns the options of the launcher, and the command between the launcher and the program.

    One of the two starts the container.

    Raises:
        RequestError: the profile starts containers with an option of srun, but the launcher is another one.
    """
    if not job.container:
        return [], list(site.launch.wrap)
    words = [_word(text, job.container) for text in site.container.command]
    if not site.container.is_option:
        return [], words
    if launcher[:1] != ["srun"]:
        option = site.container.command[0].partition("=")[0]
        raise RequestError(
            f"--container was given, but profile {site.name} starts containers with srun {option}, and the "
            "launcher is another one. Use --launcher srun."
        )
    return words, []


def container_notes(job: Job, program: Sequence[Word]) -> list[str]:
    """Returns a comment if `program` contains parts of ddp-hpc that run inside of the container."""
    if job.container and any(word.startswith("ddp_hpc.") for word in program):
        return ["ddp-hpc must be installed in the container, too."]
    return []


def _word(text: str, image: str) -> Word:
    parts = [part.replace("{image}", image) for part in text.split("{directory}")]
    # The script has changed to the submission directory by then.
    return Raw('"$PWD"'.join(sh(part) if part else "" for part in parts)) if len(parts) > 1 else parts[0]
