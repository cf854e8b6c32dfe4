"""The accounting of a test cluster: MariaDB and slurmdbd on its head node."""

from __future__ import annotations

from . import nodes
from .configuration import CLUSTER, DATABASE, HEAD, Layout
from .nodes import wait_for

_SQL = f"""\
CREATE DATABASE {DATABASE};
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
CREATE USER slurm@'%' IDENTIFIED BY 'slurm';
GRANT ALL ON {DATABASE}.* TO slurm@localhost, slurm@'%';
"""


def start_accounting(layout: Layout) -> None:
    """Starts the database and slurmdbd, and adds the cluster and an account for root.

    Raises:
        ClusterError: a program failed or does not answer.
    """
    _start_database(layout)
    nodes.call(layout, HEAD, "slurmdbd")  # its configuration is in the directory of SLURM_CONF
    ask = ["sacctmgr", "--immediate"]
    wait_for("answer from slurmdbd", lambda: nodes.call(layout, HEAD, *ask, "list", "stats", check=False), 60)
    nodes.call(layout, HEAD, *ask, "add", "cluster", CLUSTER)
    nodes.call(layout, HEAD, *ask, "add", "account", "proj", "Description=project", "Organization=test")
    nodes.call(layout, HEAD, *ask, "add", "user", "root", "Account=proj")


def _start_database(layout: Layout) -> None:
    options = ["--no-defaults", f"--datadir={layout.root}/db", "--user=root"]
    log = layout.log / "mariadb.log"
    in_log = ["sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "_", log]
    install = ["mariadb-install-db", "--auth-root-authentication-method=normal", "--skip-test-db"]
    nodes.call(layout, HEAD, *in_log, install[0], *options, *install[1:])
    server = ["--bind-address=127.0.0.1", f"--socket={layout.database_socket}"]
    server += [f"--pid-file={layout.run}/mariadb.pid", "--innodb-buffer-pool-size=32M"]
    # The database is removed with the cluster, so it need not survive a power loss.
    server += ["--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"]
    nodes.call(layout, HEAD, "setsid", "--fork", *in_log, "mariadbd", *options, *server)
    wait_for("database", layout.database_socket.exists, 60, 0.1)
    nodes.call(layout, HEAD, "mariadb", "--no-defaults", f"--socket={layout.database_socket}", "-e", _SQL)
