//! Derives findings from facts. Pure.

use super::facts::{Check, Facts, HostFacts, KeyFacts, Peer, PeerFacts};
use crate::service::ServiceState;
use serde::Serialize;

/// Difference of two clocks in seconds from which times in messages and logs mislead.
const CLOCK_OFFSET_MAX_S: f64 = 1.0;
/// Maximum number of users that a finding names.
const NAMED_USERS_MAX: usize = 8;
/// Permissions of the service's socket: every user may connect.
const SOCKET_MODE: u32 = 0o666;
/// Controllers that limit what a user's tasks use together.
const LIMITING_CONTROLLERS: [&str; 2] = ["memory", "pids"];
/// Value of kernel.yama.ptrace_scope with which only programs with CAP_SYS_PTRACE trace others, and
/// the one with which no program does.
const PTRACE_ADMIN_ONLY: u8 = 2;
const PTRACE_NEVER: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    Warning,
    Failure,
}

/// One thing that `doctor` has found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) subject: String,
    pub(super) level: Level,
    pub(super) sentence: String,
    /// The advice to the administrator; `None` if nothing must be done.
    pub(super) advice: Option<String>,
}

/// Collects findings about one subject after the other.
#[derive(Default)]
struct Report(Vec<Finding>);

impl Report {
    fn ok(&mut self, subject: impl Into<String>, sentence: impl Into<String>) {
        self.0.push(Finding {
            subject: subject.into(),
            level: Level::Ok,
            sentence: sentence.into(),
            advice: None,
        });
    }

    fn bad(
        &mut self,
        level: Level,
        subject: impl Into<String>,
        sentence: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.0.push(Finding {
            subject: subject.into(),
            level,
            sentence: sentence.into(),
            advice: Some(advice.into()),
        });
    }

    fn warning(
        &mut self,
        subject: impl Into<String>,
        sentence: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.bad(Level::Warning, subject, sentence, advice);
    }

    fn failure(
        &mut self,
        subject: impl Into<String>,
        sentence: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.bad(Level::Failure, subject, sentence, advice);
    }

    /// Adds the finding about a tested ability. If the ability is missing, `level` and
    /// `consequence` say what that means.
    fn ability(
        &mut self,
        subject: &str,
        check: &Check,
        ability: &str,
        level: Level,
        consequence: &str,
        advice: &str,
    ) {
        match check {
            Check::Works => self.ok(subject, format!("{ability} works")),
            Check::Fails(why) => {
                let sentence = format!("{ability} does not work ({why}): {consequence}");
                self.bad(level, subject, sentence, advice);
            }
            Check::NotTested(why) => {
                let advice = "nothing is wrong for certain; see the other findings";
                self.warning(subject, format!("{ability} was not tested: {why}"), advice);
            }
        }
    }
}

/// Returns the findings about this machine and the hosts that were named.
pub(super) fn find(facts: &Facts) -> Vec<Finding> {
    let mut report = Report::default();
    if !facts.host.is_root {
        report.warning(
            "user",
            "you are not root, so much cannot be tested",
            "run 'sudo pvm-admin doctor' as well",
        );
    }
    find_engine(&facts.host, &mut report);
    find_namespaces(&facts.host, &mut report);
    find_kernel(&facts.host, &mut report);
    find_control_groups(&facts.host, &mut report);
    find_service(&facts.host, &mut report);
    find_key_and_settings(&facts.host, &mut report);
    for peer in &facts.peers {
        find_peer(&facts.host, peer, &mut report);
    }
    report.0
}

fn find_engine(host: &HostFacts, report: &mut Report) {
    const SUBJECT: &str = "CRIU";
    let path = match &host.engine.program {
        Ok(path) => path.display(),
        Err(why) => {
            report.failure(
                SUBJECT,
                format!("{why}; no task can migrate or be checkpointed by CRIU"),
                "install the package sempa-criu",
            );
            return;
        }
    };
    match &host.engine.version {
        Ok(version) => report.ok(SUBJECT, format!("{path} has version {version}")),
        Err(why) => report.failure(
            SUBJECT,
            format!("{path} does not run: {why}"),
            "install the package sempa-criu, or another CRIU for this kernel",
        ),
    }
    report.ability(
        SUBJECT,
        &host.engine.trial,
        "dump and restore of a process in namespaces of its own",
        Level::Failure,
        "tasks cannot migrate or be checkpointed by CRIU",
        "the reason is CRIU's own; 'criu check --all' as root says what this kernel lacks",
    );
}

fn find_namespaces(host: &HostFacts, report: &mut Report) {
    const SUBJECT: &str = "namespaces";
    const CONTAINER: &str = "a container needs CAP_SYS_ADMIN, and a seccomp profile that permits unshare, setns and \
                             mount (--privileged, or the machine itself instead of a container)";
    report.ability(
        SUBJECT,
        &host.namespaces,
        "making a PID and a mount namespace",
        Level::Failure,
        "tasks run as ordinary processes and cannot migrate by CRIU",
        CONTAINER,
    );
    // Without namespaces the other tests have no results.
    if host.namespaces != Check::Works {
        return;
    }
    report.ability(
        SUBJECT,
        &host.enter_namespaces,
        "entering the namespaces of a task",
        Level::Failure,
        "CRIU cannot run where the tasks are",
        CONTAINER,
    );
    report.ability(
        SUBJECT,
        &host.proc_mount,
        "mounting /proc in a task's namespaces",
        Level::Failure,
        "CRIU cannot dump the tasks of ordinary users",
        "in a container, /proc must not be masked (--security-opt systempaths=unconfined)",
    );
    report.ability(
        SUBJECT,
        &host.last_pid,
        "choosing the PID of a process (ns_last_pid)",
        Level::Failure,
        "tasks cannot be restored with their PIDs",
        "mount /proc/sys writable; the kernel needs CONFIG_CHECKPOINT_RESTORE",
    );
}

fn find_kernel(host: &HostFacts, report: &mut Report) {
    report.ability(
        "memory",
        &host.userfaultfd,
        "handling of missing memory (userfaultfd)",
        Level::Warning,
        "there is no post-copy, so tasks with much memory are paused longer when they migrate",
        "the kernel needs CONFIG_USERFAULTFD; a container's seccomp profile must permit the call",
    );
    report.ability(
        "memory",
        &host.page_scan,
        "the search for used pages (PAGEMAP_SCAN)",
        Level::Warning,
        "it is done page by page, and takes longer",
        "use Linux 6.7 or later",
    );
    match host.has_sys_resource {
        true => report.ok("capabilities", "root has CAP_SYS_RESOURCE"),
        false => report.warning(
            "capabilities",
            "root has no CAP_SYS_RESOURCE here: CRIU reads the limits of tasks by a library of Sempa, and \
             no task can have limits above those of the service",
            "nothing needs to be done; to remove the restriction, give the container CAP_SYS_RESOURCE",
        ),
    }
    match host.ptrace_scope {
        Some(PTRACE_NEVER..) => report.failure(
            "ptrace",
            "no program may trace another one (kernel.yama.ptrace_scope = 3), so CRIU cannot work",
            "set kernel.yama.ptrace_scope to 2 or less in /etc/sysctl.d, and reboot: it cannot be lowered \
             while the system runs",
        ),
        Some(PTRACE_ADMIN_ONLY) => report.ok(
            "ptrace",
            "only root traces processes (kernel.yama.ptrace_scope = 2), as the service does",
        ),
        _ => report.ok("ptrace", "processes can be traced"),
    }
}

fn find_control_groups(host: &HostFacts, report: &mut Report) {
    const SUBJECT: &str = "control groups";
    let Some(mount) = &host.cgroups.mount else {
        report.warning(
            SUBJECT,
            "version 2 is not mounted: a tasker mounts its own part, and without the right to do so it stops \
             tasks by signals, which programs can notice",
            "mount version 2 at /sys/fs/cgroup (the default of systemd)",
        );
        return;
    };
    report.ok(
        SUBJECT,
        format!("version 2 is mounted at {}", mount.display()),
    );
    report.ability(
        SUBJECT,
        &host.cgroups.freezer,
        "freezing",
        Level::Warning,
        "paused tasks are stopped by signals, which programs can notice",
        "the service needs a control group of its own that it may change (Delegate=yes in its unit)",
    );
    let is_missing = |name: &&str| !host.cgroups.controllers.iter().any(|have| have == name);
    let missing: Vec<&str> = LIMITING_CONTROLLERS
        .into_iter()
        .filter(is_missing)
        .collect();
    match missing.is_empty() {
        true => report.ok(SUBJECT, "memory and processes can be limited"),
        false => report.warning(
            SUBJECT,
            format!(
                "version 2 has no controller {}: such limits hold for each process only",
                missing.join(" and ")
            ),
            "boot without version 1 of these controllers (systemd.unified_cgroup_hierarchy=1)",
        ),
    }
}

fn find_service(host: &HostFacts, report: &mut Report) {
    const SUBJECT: &str = "service";
    match &host.service {
        ServiceState::Answers { version, .. } if *version == host.version => {
            report.ok(SUBJECT, format!("pvm-taskerd {version} answers"));
        }
        ServiceState::Answers { version, .. } => report.warning(
            SUBJECT,
            format!("pvm-taskerd has version {version}, and this program {}", host.version),
            "restart the service after an upgrade (systemctl restart sempa-taskerd); tasks go on",
        ),
        ServiceState::Absent => report.failure(
            SUBJECT,
            "pvm-taskerd does not run: tasks of ordinary users cannot migrate by CRIU or be checkpointed",
            "install the package sempa-node, and start it: systemctl enable --now sempa-taskerd.socket",
        ),
        ServiceState::SwitchedOff => report.warning(
            SUBJECT,
            "the variable SEMPA_TASKERD switches the service off for your virtual machines",
            "unset SEMPA_TASKERD",
        ),
        ServiceState::Failed { why } => report.failure(
            SUBJECT,
            format!("pvm-taskerd fails: {why}"),
            "read its log: journalctl -u sempa-taskerd",
        ),
    }
    let Some(socket) = &host.socket else { return };
    let path = socket.path.display();
    if socket.owner != 0 {
        report.failure(
            SUBJECT,
            format!(
                "the socket {path} belongs to user {}, and not to root",
                socket.owner
            ),
            "daemons must not use it: remove it, find out who has made it, and restart the service",
        );
    } else if socket.mode & SOCKET_MODE != SOCKET_MODE {
        report.failure(
            SUBJECT,
            format!(
                "not every user may connect to {path} (mode {:04o})",
                socket.mode
            ),
            format!("chmod 666 {path}, or SocketMode=0666 in the unit of the socket"),
        );
    } else {
        report.ok(SUBJECT, format!("every user may connect to {path}"));
    }
}

fn find_key_and_settings(host: &HostFacts, report: &mut Report) {
    match &host.site_key {
        KeyFacts::Present(id) => report.ok("site key", format!("its identifier is {id}")),
        KeyFacts::Refused(why) => report.failure(
            "site key",
            format!("{why}; without it no task of an ordinary user migrates"),
            "see 'pvm-admin site-key' in pvm-admin(8)",
        ),
        KeyFacts::NotReadable => report.warning(
            "site key",
            "only root can say whether it is valid",
            "run 'sudo pvm-admin site-key show'",
        ),
    }
    match &host.settings {
        Ok(path) => report.ok(
            "settings",
            format!("{} is valid or missing", path.display()),
        ),
        Err(why) => report.failure(
            "settings",
            format!("{why}; the service runs no tasks with such settings"),
            "correct the file; 'pvm-admin limits' shows what is in force",
        ),
    }
}

fn find_peer(host: &HostFacts, peer: &Peer, report: &mut Report) {
    let name = &peer.name;
    let facts = match &peer.facts {
        Ok(facts) => facts,
        Err(why) => {
            report.failure(
                name,
                format!("ssh does not reach it without a question: {why}"),
                format!("make this command succeed: ssh -o BatchMode=yes {name} true"),
            );
            return;
        }
    };
    report.ok(name, "ssh reaches it without a question");
    match &facts.version {
        Some(version) if *version == host.version => {
            report.ok(name, format!("it has version {version}, too"));
        }
        Some(version) => report.warning(
            name,
            format!("it has version {version}, and this host {}", host.version),
            "install the same version on all hosts",
        ),
        None => report.failure(
            name,
            "pvm-admin is not installed there, or not in the search path",
            "install the package sempa-node there",
        ),
    }
    find_peer_clock(name, facts, report);
    find_peer_users(host, name, facts, report);
    if facts.version.is_some() {
        find_peer_key(host, name, facts, report);
    }
    find_peer_datagrams(name, facts, report);
}

fn find_peer_clock(name: &str, facts: &PeerFacts, report: &mut Report) {
    let Some(offset) = facts.clock_offset_s else {
        return;
    };
    let direction = if offset > 0.0 { "ahead" } else { "behind" };
    let seconds = offset.abs();
    match seconds > CLOCK_OFFSET_MAX_S {
        false => report.ok(name, "its clock is right within a second"),
        true => report.warning(
            name,
            format!("its clock is {seconds:.0} s {direction}, so times of events mislead"),
            "synchronize the clocks of all hosts (chrony or systemd-timesyncd)",
        ),
    }
}

/// Returns names as a list, at most [`NAMED_USERS_MAX`].
fn name_list(names: &[String]) -> String {
    let named = names[..names.len().min(NAMED_USERS_MAX)].join(", ");
    match names.len().checked_sub(NAMED_USERS_MAX) {
        None | Some(0) => named,
        Some(others) => format!("{named} and {others} others"),
    }
}

fn find_peer_users(host: &HostFacts, name: &str, facts: &PeerFacts, report: &mut Report) {
    let on_both = || {
        host.users
            .iter()
            .filter_map(|(user, uid)| Some((user, uid, facts.users.get(user)?)))
    };
    let different: Vec<String> = on_both()
        .filter(|(_, here, there)| here != there)
        .map(|(user, here, there)| format!("{user} (here {here}, there {there})"))
        .collect();
    let missing: Vec<String> = host
        .users
        .keys()
        .filter(|user| !facts.users.contains_key(*user))
        .cloned()
        .collect();
    if !different.is_empty() {
        report.failure(
            name,
            format!("these users have other uids there: {}", name_list(&different)),
            "tasks of a user migrate only between hosts where the user has the same name and uid; use a \
             common account database, or change the uids",
        );
    }
    if !missing.is_empty() {
        report.warning(
            name,
            format!("these users have no account there: {}", name_list(&missing)),
            "tasks of these users cannot migrate there; create the accounts with the same uids",
        );
    }
    if different.is_empty() && missing.is_empty() {
        let count = host.users.len();
        report.ok(
            name,
            format!("the users of this host ({count}) have the same uids there"),
        );
    }
}

fn find_peer_key(host: &HostFacts, name: &str, facts: &PeerFacts, report: &mut Report) {
    let copy =
        "copy /etc/sempa/site.key of one host to all others, as 'pvm-admin site-key create' says";
    match (&host.site_key, &facts.site_key) {
        (KeyFacts::Present(here), Some(Ok(there))) if here == there => {
            report.ok(name, "it has the same site key");
        }
        (KeyFacts::Present(here), Some(Ok(there))) => report.failure(
            name,
            format!(
                "it has the site key {there}, and this host {here}: no task migrates between them"
            ),
            copy,
        ),
        (KeyFacts::Refused(_), Some(Ok(there))) => report.failure(
            name,
            format!("it has the site key {there}, and this host has none"),
            copy,
        ),
        (_, Some(Err(why))) if why.contains("there is no site key") => {
            report.failure(name, "it has no site key", copy);
        }
        (_, Some(Err(why))) => report.warning(
            name,
            format!("its site key could not be compared: {why}"),
            format!("compare by hand: 'pvm-admin site-key show' as root here and on {name}"),
        ),
        (KeyFacts::NotReadable, Some(Ok(there))) => report.warning(
            name,
            format!(
                "it has the site key {there}, and only root can say whether this host has the same"
            ),
            "run 'sudo pvm-admin doctor' with the same hosts",
        ),
        (_, None) => report.warning(
            name,
            "its site key could not be compared",
            format!("compare by hand: 'pvm-admin site-key show' as root here and on {name}"),
        ),
    }
}

fn find_peer_datagrams(name: &str, facts: &PeerFacts, report: &mut Report) {
    const ADVICE: &str = "daemons exchange datagrams on any UDP port, or on PVMNETSOCKPORT: permit them in both \
                          firewalls, and repeat with --port if only one port is permitted";
    let Some(udp) = &facts.udp else {
        report.warning(
            name,
            "whether the firewalls pass datagrams cannot be told without pvm-admin there",
            "install the package sempa-node there",
        );
        return;
    };
    report.ability(
        name,
        &udp.from_here,
        "a datagram to it",
        Level::Failure,
        "a daemon there cannot join a virtual machine of this host",
        ADVICE,
    );
    report.ability(
        name,
        &udp.from_there,
        "a datagram from it that is no answer",
        Level::Failure,
        "its daemon cannot reach one of this host",
        ADVICE,
    );
}

#[cfg(test)]
mod tests;
