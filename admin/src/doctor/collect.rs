//! Collects facts about this machine.

use super::facts::{CgroupFacts, Check, EngineFacts, HostFacts, KeyFacts, SocketFacts};
use super::{probes, system_calls};
use crate::process::run;
use crate::service;
use checkpoint::capabilities::CapabilitySet;
use checkpoint::criu::{Criu, check_page_scan};
use checkpoint::engine::Engine;
use checkpoint::seal::{SiteKeys, site_key_path};
use nix::unistd::geteuid;
use procfs::process::Process;
use sempa_proto::cgroup;
use sempa_service_settings::{SETTINGS_VARIABLE, Settings, settings_path};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time limit for all tests in new namespaces together.
const PROBE_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit for the freezer.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for the list of users, which may come from a server.
const USERS_TIMEOUT: Duration = Duration::from_secs(10);
/// Uids of persons. Other accounts belong to programs.
pub(super) const PERSON_UIDS: std::ops::Range<u32> = 1000..60_000;
/// Maximum number of users of a host that are compared.
pub(super) const USERS_MAX: usize = 10_000;
const NOT_ROOT: &str = "only root can test this";

pub(super) fn collect_host() -> HostFacts {
    let is_root = geteuid().is_root();
    let criu = Criu::locate(|name| std::env::var_os(name));
    let probed = Probed::run(is_root, criu.as_ref().ok().map(Criu::program));
    let socket_path = service::socket_path();
    let settings_path = settings_path(std::env::var_os(SETTINGS_VARIABLE));
    HostFacts {
        version: env!("CARGO_PKG_VERSION").into(),
        is_root,
        engine: EngineFacts {
            version: match &criu {
                Ok(criu) => criu.query_version().map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            },
            program: criu
                .map(|criu| criu.program().to_path_buf())
                .map_err(|error| error.to_string()),
            trial: probed.check(probes::TRIAL),
        },
        namespaces: probed.check(probes::NAMESPACES),
        proc_mount: probed.check(probes::PROC_MOUNT),
        last_pid: probed.check(probes::LAST_PID),
        enter_namespaces: probed.check(probes::ENTER_NAMESPACES),
        userfaultfd: match is_root {
            true => Check::from_result(system_calls::test_userfaultfd()),
            false => Check::NotTested(NOT_ROOT.into()),
        },
        page_scan: Check::from_result(check_page_scan()),
        has_sys_resource: has_sys_resource(is_root),
        ptrace_scope: fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
            .ok()
            .and_then(|text| text.trim().parse().ok()),
        cgroups: collect_cgroups(is_root),
        settings: Settings::load(&settings_path)
            .map(|_| settings_path)
            .map_err(|error| error.to_string()),
        site_key: match (is_root, SiteKeys::load(&site_key_path())) {
            (_, Ok(keys)) => KeyFacts::Present(keys.current_id().to_string()),
            (true, Err(error)) => KeyFacts::Refused(error.to_string()),
            (false, Err(_)) => KeyFacts::NotReadable,
        },
        service: service::query(socket_path.as_deref()),
        socket: socket_path.and_then(socket_facts),
        users: list_users(),
    }
}

/// True if root's programs have CAP_SYS_RESOURCE on this machine.
fn has_sys_resource(is_root: bool) -> bool {
    let status = Process::myself().and_then(|process| process.status());
    status.is_ok_and(|status| {
        let bits = match is_root {
            true => status.capeff,
            // Kernels without this field are too old for the tasker.
            false => status.capbnd.unwrap_or_default(),
        };
        CapabilitySet::from_bits_retain(bits).contains(CapabilitySet::SYS_RESOURCE)
    })
}

fn socket_facts(path: PathBuf) -> Option<SocketFacts> {
    let metadata = fs::symlink_metadata(&path).ok()?;
    Some(SocketFacts {
        path,
        owner: metadata.uid(),
        mode: metadata.mode() & 0o7777,
    })
}

/// Results of the tests in new namespaces.
struct Probed {
    results: BTreeMap<String, Check>,
    /// The result of tests that gave none.
    missing: Check,
}

impl Probed {
    fn run(is_root: bool, criu: Option<&Path>) -> Self {
        let nothing = |missing| Self {
            results: BTreeMap::new(),
            missing,
        };
        if !is_root {
            return nothing(Check::NotTested(NOT_ROOT.into()));
        }
        let program = match std::env::current_exe() {
            Ok(program) => program,
            Err(error) => return nothing(Check::NotTested(error.to_string())),
        };
        let mut command = Command::new(program);
        command.args(["probe", "namespaces"]);
        if let Some(criu) = criu {
            command.arg("--criu").arg(criu);
        }
        match run(command, b"", PROBE_TIMEOUT) {
            Ok(finished) => Self {
                results: parse_results(&finished.stdout),
                missing: Check::NotTested("an earlier test failed".into()),
            },
            Err(error) => nothing(Check::Fails(error.to_string())),
        }
    }

    fn check(&self, name: &str) -> Check {
        self.results
            .get(name)
            .cloned()
            .unwrap_or_else(|| self.missing.clone())
    }
}

/// Parses what the tests have printed: `NAME works` or `NAME fails REASON`.
fn parse_results(text: &str) -> BTreeMap<String, Check> {
    let parse_line = |line: &str| {
        let (name, result) = line.split_once(' ')?;
        let check = match result.split_once(' ') {
            None if result == "works" => Check::Works,
            Some(("fails", why)) => Check::Fails(why.into()),
            _ => return None,
        };
        Some((name.to_string(), check))
    };
    text.lines().filter_map(parse_line).collect()
}

fn collect_cgroups(is_root: bool) -> CgroupFacts {
    let read = |name: &str| fs::read(Path::new("/proc/self").join(name)).unwrap_or_default();
    let mounts = read("mountinfo");
    let mount = cgroup::find_mount_point(&mounts, None);
    let controllers = mount.as_ref().and_then(|mount| {
        let text = fs::read_to_string(mount.join("cgroup.controllers")).ok()?;
        Some(text.split_whitespace().map(str::to_string).collect())
    });
    let own_group = cgroup::group_dir(&mounts, &read("cgroup"), None);
    let freezer = match (&mount, own_group) {
        (None, _) => Check::NotTested("control groups of version 2 are not mounted".into()),
        (Some(_), None) => Check::Fails("the own control group is not visible".into()),
        (Some(_), Some(_)) if !is_root => Check::NotTested(NOT_ROOT.into()),
        (Some(_), Some(group)) => Check::from_result(try_freezer(&group)),
    };
    CgroupFacts {
        mount,
        controllers: controllers.unwrap_or_default(),
        freezer,
    }
}

/// Freezes an empty control group below `own_group`.
fn try_freezer(own_group: &Path) -> io::Result<()> {
    let group = own_group.join(format!("sempa-doctor-{}", std::process::id()));
    fs::create_dir(&group)?;
    let freeze = || {
        fs::write(group.join("cgroup.freeze"), "1")?;
        let deadline = Instant::now() + FREEZE_TIMEOUT;
        while !fs::read_to_string(group.join("cgroup.events"))?.contains("frozen 1") {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    };
    let result = freeze();
    fs::remove_dir(&group)?;
    result
}

/// Returns the users of this host who are persons.
fn list_users() -> BTreeMap<String, u32> {
    let mut command = Command::new("getent");
    command.arg("passwd");
    match run(command, b"", USERS_TIMEOUT) {
        Ok(finished) => parse_accounts(&finished.stdout),
        Err(_) => BTreeMap::new(),
    }
}

/// Parses lines of the account database.
pub(super) fn parse_accounts(text: &str) -> BTreeMap<String, u32> {
    let parse_line = |line: &str| {
        let mut fields = line.split(':');
        let (name, uid) = (fields.next()?, fields.nth(1)?.parse().ok()?);
        PERSON_UIDS.contains(&uid).then(|| (name.to_string(), uid))
    };
    text.lines()
        .filter_map(parse_line)
        .take(USERS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_probes_are_parsed() {
        let text = "a works\nb fails no such thing\nc works well\nnoise\n\nd fails\n";
        let results = parse_results(text);
        let expected = [
            ("a".to_string(), Check::Works),
            ("b".to_string(), Check::Fails("no such thing".into())),
        ];
        assert_eq!(results, expected.into());
    }

    #[test]
    fn accounts_of_persons_are_listed() {
        let text = "root:x:0:0::/:/bin/sh\nalice:x:1000:100::/:/bin/sh\nnobody:x:65534:1::/:/\nbad\nb:x:y:\n";
        assert_eq!(parse_accounts(text), [("alice".to_string(), 1000)].into());
    }
}
