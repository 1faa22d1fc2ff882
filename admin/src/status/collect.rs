//! Collects the status of this machine.

use super::{MachineStatus, ServiceHealth, TaskProcess, TaskerStatus, UserStatus, VmStatus};
use crate::service;
use crate::users::user_name;
use anyhow::Result;
use checkpoint::criu::Criu;
use checkpoint::seal::{SiteKeys, site_key_path};
use procfs::{Current, LoadAverage, Meminfo};
use pvm_load_watcher::host_daemons::{HostTasker, resident_bytes, taskers};
use pvm_load_watcher::machine_link;
use pvm_load_watcher::owner_override::{self, OVERRIDES_DIR_VAR, overrides_dir};
use pvm_load_watcher::status::{WatcherStatus, query_all};
use sempa_proto::tasker_service::{SESSIONS_DIR, SessionRecord};
use sempa_service_settings::{SETTINGS_VARIABLE, Settings, settings_path};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

const ROOT_UID: u32 = 0;
/// Time for the load watcher of the machine to answer.
const OWNER_SENSE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn collect() -> Result<MachineStatus> {
    let (watchers, mut errors) = query_all()?;
    let sessions = read_sessions(Path::new(SESSIONS_DIR)).unwrap_or_else(|error| {
        errors.push(format!("{SESSIONS_DIR} cannot be read: {error}"));
        BTreeMap::new()
    });
    let dir = overrides_dir(std::env::var_os(OVERRIDES_DIR_VAR).map(Into::into));
    let drain = owner_override::read(&dir, ROOT_UID).map(|root_override| root_override.drain);
    let drain = drain.unwrap_or_else(|error| {
        errors.push(error.to_string());
        None
    });
    let virtual_machines = join(&taskers(), &sessions, watchers);
    let load = LoadAverage::current().ok();
    Ok(MachineStatus {
        host: nix::unistd::gethostname()?.to_string_lossy().into_owned(),
        load: load.map(|load| [load.one, load.five, load.fifteen]),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        available_bytes: Meminfo::current()
            .ok()
            .and_then(|info| info.mem_available)
            .unwrap_or(0),
        service: service_health(),
        drained: drain.map(|drain| drain.reason),
        users: sum_of_users(&virtual_machines),
        virtual_machines,
        errors,
    })
}

fn service_health() -> ServiceHealth {
    let settings_path = settings_path(std::env::var_os(SETTINGS_VARIABLE));
    ServiceHealth {
        state: service::query(service::socket_path().as_deref()),
        site_key: SiteKeys::load(&site_key_path())
            .map(|keys| keys.current_id().to_string())
            .map_err(|error| error.to_string()),
        engine: Criu::locate(|name| std::env::var_os(name))
            .map(|criu| criu.program().display().to_string())
            .map_err(|error| error.to_string()),
        settings: Settings::load(&settings_path)
            .map(|_| settings_path.display().to_string())
            .map_err(|error| error.to_string()),
        owner_sense: owner_sense(),
    }
}

fn owner_sense() -> Result<String, String> {
    let path = machine_link::socket_path().ok_or("the service is not used")?;
    machine_link::ask_alive(&path, OWNER_SENSE_TIMEOUT)
        .map(|()| "one load watcher serves all virtual machines".into())
        .map_err(|error| {
            format!(
                "each virtual machine detects owners itself; no load watcher of the machine answers at {}: {error}",
                path.display()
            )
        })
}

/// Reads the records of the taskers that the service has started and that run, by PID.
fn read_sessions(dir: &Path) -> io::Result<BTreeMap<i32, SessionRecord>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    let mut sessions = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        let pid: Option<i32> = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        // A tasker may end, and its record be removed, at any time.
        let record = fs::read_to_string(entry.path())
            .ok()
            .and_then(|text| text.parse::<SessionRecord>().ok());
        let (Some(pid), Some(record)) = (pid, record) else {
            continue;
        };
        if checkpoint::proc::stat(pid).is_some_and(|stat| stat.starttime == record.start_ticks) {
            sessions.insert(pid, record);
        }
    }
    Ok(sessions)
}

/// Joins taskers with the load watchers that they have started.
fn join(
    taskers: &[HostTasker],
    sessions: &BTreeMap<i32, SessionRecord>,
    mut watchers: Vec<WatcherStatus>,
) -> Vec<VmStatus> {
    let mut virtual_machines = Vec::new();
    for tasker in taskers {
        let session = sessions.get(&tasker.pid);
        let position = watchers
            .iter()
            .position(|watcher| tasker.watchers.contains(&watcher.pid));
        let watcher = position.map(|index| watchers.remove(index));
        let tasks: Vec<TaskProcess> = tasker
            .task_processes
            .iter()
            .map(|(pid, program)| TaskProcess {
                pid: *pid,
                program: program.clone(),
                resident_bytes: resident_bytes(*pid),
            })
            .collect();
        virtual_machines.push(VmStatus {
            name: watcher.as_ref().map(|watcher| watcher.vm.clone()),
            user: user_name(session.map_or(tasker.uid, |session| session.uid)),
            task_bytes: tasks.iter().map(|task| task.resident_bytes).sum(),
            tasker: Some(TaskerStatus {
                pid: tasker.pid,
                by_service: session.is_some(),
                tasks,
            }),
            watcher,
        });
    }
    // Other users' processes may be invisible, and a load watcher may have been started by hand.
    virtual_machines.extend(watchers.into_iter().map(|watcher| VmStatus {
        name: Some(watcher.vm.clone()),
        user: watcher.user.clone(),
        tasker: None,
        task_bytes: watcher.tasks.iter().map(|task| task.resident_bytes).sum(),
        watcher: Some(watcher),
    }));
    virtual_machines.sort_by(|a, b| (&a.user, &a.name).cmp(&(&b.user, &b.name)));
    virtual_machines
}

fn sum_of_users(virtual_machines: &[VmStatus]) -> Vec<UserStatus> {
    let mut users = BTreeMap::<&str, UserStatus>::new();
    for vm in virtual_machines {
        let user = users.entry(&vm.user).or_default();
        user.user = vm.user.clone();
        user.virtual_machines += 1;
        user.task_processes += vm.task_count();
        user.task_bytes += vm.task_bytes;
    }
    users.into_values().collect()
}

impl VmStatus {
    /// Returns the number of processes of tasks, or of guests if the processes are not known.
    pub(super) fn task_count(&self) -> usize {
        match (&self.tasker, &self.watcher) {
            (Some(tasker), _) => tasker.tasks.len(),
            (None, Some(watcher)) => watcher.tasks.len(),
            (None, None) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watcher(pid: i32, vm: &str) -> WatcherStatus {
        WatcherStatus {
            vm: vm.into(),
            user: "bob".into(),
            pid,
            ..WatcherStatus::default()
        }
    }

    fn tasker(pid: i32, watchers: &[i32], tasks: &[(i32, &str)]) -> HostTasker {
        let task = |(pid, name): &(i32, &str)| (*pid, name.to_string());
        HostTasker {
            pid,
            uid: 0,
            watchers: watchers.to_vec(),
            task_processes: tasks.iter().map(task).collect(),
        }
    }

    /// A tasker of the service belongs to the user of its session, and to the virtual machine of
    /// its load watcher.
    #[test]
    fn taskers_are_joined_with_sessions_and_watchers() {
        let record = SessionRecord {
            uid: u32::MAX - 5,
            start_ticks: 1,
        };
        let taskers = [
            tasker(10, &[11], &[(0, "ring"), (0, "ring")]),
            tasker(20, &[], &[(0, "hold")]),
        ];
        let watchers = vec![watcher(11, "a"), watcher(99, "b")];
        let vms = join(&taskers, &[(10, record)].into(), watchers);
        let summary: Vec<(Option<&str>, &str, usize, bool)> = vms
            .iter()
            .map(|vm| {
                let by_service = vm.tasker.as_ref().is_some_and(|tasker| tasker.by_service);
                (
                    vm.name.as_deref(),
                    vm.user.as_str(),
                    vm.task_count(),
                    by_service,
                )
            })
            .collect();
        let nobody = (u32::MAX - 5).to_string();
        assert_eq!(
            summary,
            [
                (Some("a"), nobody.as_str(), 2, true),
                (Some("b"), "bob", 0, false),
                (None, "root", 1, false),
            ]
        );
        let users = sum_of_users(&vms);
        let counts: Vec<(&str, usize)> = users
            .iter()
            .map(|user| (user.user.as_str(), user.task_processes))
            .collect();
        assert_eq!(counts, [(nobody.as_str(), 2), ("bob", 0), ("root", 1)]);
    }

    /// Records of taskers that have ended, and other files, are ignored.
    #[test]
    fn only_records_of_running_taskers_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(
            read_sessions(&dir.path().join("none"))
                .expect("no records")
                .is_empty()
        );
        let pid = std::process::id().cast_signed();
        let start_ticks = checkpoint::proc::stat(pid).expect("it runs").starttime;
        let record = SessionRecord {
            uid: 7,
            start_ticks,
        };
        let write = |name: &str, text: String| {
            fs::write(dir.path().join(name), text).expect("the test's own directory");
        };
        write(&pid.to_string(), record.to_string());
        write("1", "7 1\n".into());
        write("x", "7 1\n".into());
        write("2", "garbage".into());
        let sessions = read_sessions(dir.path()).expect("records");
        assert_eq!(sessions, [(pid, record)].into());
    }
}
