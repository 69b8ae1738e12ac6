"""What containers have whose create says nothing, by the operator's configuration.

`Defaults` is made once, when the daemon starts. What inspect shows of a container is written into
its HostConfig by its create (`applied`). The rest holds for its next start, as in dockerd: the
parent of its cgroup, no-new-privileges, the seccomp profile and the ids of its user namespace.

Not here: the init program (`spec.has_init`), logs (`log_plan.py`), the rules of the values
(`config/rules.py`).
"""

from __future__ import annotations

import msgspec

from engine.common.seccomp_profiles import BUILTIN, UNCONFINED
from engine.config import Config, seccomp_document, size_in_bytes, ulimit
from engine.containers import body, limits
from engine.containers.body import PRIVATE
from engine.errors import InvalidParameter, ServerError
from engine.runtime import capabilities, scopes, seccomp, subordinate
from engine.system.user_namespaces import IdMap
from engine.wire.containers import HostConfig, Ulimit


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. The values of this class are Docker's own defaults."""

    cgroup_parent: str = ""
    """Empty: the driver's own (`runtime/cgroups.py`)."""
    cgroup_driver: scopes.Driver = "cgroupfs"
    cgroupns_mode: str = ""
    """Empty: `private` with cgroup v2 alone, otherwise `host`."""
    ipc_mode: str = PRIVATE
    shm_size: int = 64 << 20
    ulimits: tuple[Ulimit, ...] = ()
    no_new_privileges: bool = False
    filters: seccomp.Filters | None = msgspec.field(default_factory=seccomp.builtin)
    """Of the seccomp profile; None for none."""
    ids: IdMap | None = None
    """Of containers in user namespaces; None: they have the host's."""

    def ids_of(self, host: HostConfig) -> IdMap | None:
        """The ids of a container's next run; None for those of the host."""
        return None if host.userns_mode == "host" else self.ids

    def applied(self, host: HostConfig, *, unified: bool) -> HostConfig:
        """A HostConfig with the defaults that inspect shows. `unified`: cgroup v2 alone."""
        cgroupns = self.cgroupns_mode or ("private" if unified else "host")
        if host.privileged and not unified:
            cgroupns = "host"  # as in Docker
        ulimits = host.ulimits
        if self.ulimits:
            named = {each.name for each in ulimits or ()}
            ulimits = [*(ulimits or ()), *(each for each in self.ulimits if each.name not in named)]
        return msgspec.structs.replace(
            host,
            cgroupns_mode=host.cgroupns_mode or cgroupns,
            ipc_mode=host.ipc_mode or self.ipc_mode,
            shm_size=host.shm_size or self.shm_size,
            ulimits=ulimits,
        )


DOCKERS = Defaults()


def without(host: HostConfig) -> HostConfig:
    """A HostConfig for which the operator's defaults do not hold, apart from those that `applied`
    sets.
    """
    options = ["no-new-privileges=false", f"seccomp={BUILTIN}", *(host.security_opt or ())]
    return msgspec.structs.replace(host, init=host.init if isinstance(host.init, bool) else False, security_opt=options)


def of(config: Config, mode: str = "") -> Defaults:
    """Those of a configuration, on a host with this `Cgroups.mode`. Reads the file of the seccomp
    profile, and the host's users.

    Raises ServerError for a file that has become invalid since the configuration was checked, for
    limits that this engine may not set, for a driver of cgroups that this host does not have, and
    for a user without subordinate ids.
    """
    driver = scopes.driver(config.exec_opts, mode)
    try:
        body.check_cgroup_parent(config.cgroup_parent, driver)
    except InvalidParameter as error:
        raise ServerError(f"--cgroup-parent: {error.message}") from error
    ulimits = [Ulimit(name=name, soft=soft, hard=hard) for name, soft, hard in map(ulimit, config.ulimits)]
    raisable = "CAP_SYS_RESOURCE" in capabilities.bounding()
    try:
        for each in ulimits:
            limits.rlimit(each, raisable=raisable)
        return Defaults(
            cgroup_parent=config.cgroup_parent,
            cgroup_driver=driver,
            cgroupns_mode=config.cgroupns_mode,
            ipc_mode=config.ipc_mode,
            shm_size=size_in_bytes(config.shm_size),
            ulimits=tuple(ulimits),
            no_new_privileges=config.no_new_privileges,
            filters=_filters(config.seccomp_profile),
            ids=subordinate.of_option(config.userns_remap) if config.userns_remap else None,
        )
    except InvalidParameter as error:
        raise ServerError(f"--default-ulimit: {error.message}") from error
    except ValueError as error:
        raise ServerError(f"--seccomp-profile {error}") from error


def _filters(profile: str) -> seccomp.Filters | None:
    if profile == UNCONFINED:
        return None
    return seccomp.builtin() if profile == BUILTIN else seccomp.Filters(seccomp_document(profile))
