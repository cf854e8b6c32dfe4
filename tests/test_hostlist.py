"""Slurm's compressed lists, valid and invalid ones."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.hostlist import MAX_HOSTS, expand_counts, expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,x", ["n1", "x"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1,3]", ["n1", "n3"]),
        ("gpu[001-002],x", ["gpu001", "gpu002", "x"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[1-2,5,7-8]", ["n1", "n2", "n5", "n7", "n8"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib0", ["n1-ib0", "n2-ib0"]),
        ("a[1,2],b[3,4]", ["a1", "a2", "b3", "b4"]),
        ("nid[000001,000004].site.org", ["nid000001.site.org", "nid000004.site.org"]),
        ("[1-2]", ["1", "2"]),
        (" n1,n2 \n", ["n1", "n2"]),
    ],
)
def test_a_host_list_expands_as_with_scontrol(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


BROKEN = [
    *("", " ", ",", "n1,", ",n1", "n1,,n2", "n[1-2],"),
    *("n[", "n]", "n[]", "n[1", "n1]", "n[1]]", "n[[1]]", "n[1]x["),
    *("n[1-]", "n[-1]", "n[1--2]", "n[1-2-3]", "n[,]", "n[1,]", "n[a-b]", "n[5-1]"),
    "n[" + "9" * 5000 + "]",
]


@pytest.mark.parametrize("text", BROKEN)
def test_an_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"^the host list "):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-999999999999999999]", "r[1-1000]n[1-1000]", "n[1-60000],m[1-60000]"]
)
def test_a_list_above_slurms_node_limit_is_refused_before_expansion(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=f"more than {MAX_HOSTS} nodes"):
        expand_hostlist(text)
    assert time.monotonic() - start < 1


def test_many_brackets_do_not_cause_deep_recursion() -> None:
    assert expand_hostlist("[1]" * 20000) == ["1" * 20000]


@given(st.text("n0123456789[],-. x", max_size=60))
@settings(max_examples=400, deadline=1000)
def test_any_text_gives_hosts_or_a_launch_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except LaunchError:
        return
    assert 0 < len(hosts) <= MAX_HOSTS
    assert all(host and not set(host) & set("[],") for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("2,1", [2, 1]), (" 1(x2) ", [1, 1]), ("4,2(x2)", [4, 2, 2])],
)
def test_run_lengths_of_tasks_per_node_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "-1", "2,,1", "2(x3", "\u0663", "9" * 5000])
def test_an_invalid_run_length_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a list of tasks per node"):
        expand_counts(text)


def test_a_run_length_of_a_billion_is_refused() -> None:
    with pytest.raises(LaunchError, match=f"more than {MAX_HOSTS} nodes"):
        expand_counts("1(x999999999)")
