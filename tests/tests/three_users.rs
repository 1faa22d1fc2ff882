//! Three ordinary users at once on hosts with the tasker service: the tasks of each migrate by
//! hand, before an owner, before a drain, and from a checkpoint, as those of root do, and none has
//! anything to do with the others.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::{require_prefix_in_hosts, require_program, require_testbed};
use sempa_tests::ring_job::RingJob;
use sempa_tests::run::{CommandResult, run_to_end};
use sempa_tests::ssh::SshLogin;
use sempa_tests::tablix::{SearchParameters, TABLIX_PROGRAMS, TablixSearch};
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::{ALICE, Account, BOB, CAROL};
use sempa_tests::timetable::School;
use sempa_tests::vm::{Task, VmSettings};
use sempa_tests::{Host, OrPanicWithLogs, Testbed, Vm, wait_for};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const USERS: [Account; 3] = [ALICE, BOB, CAROL];
const SLAVES: [&str; 3] = ["h2", "h3", "h4"];
/// The host whose owner logs in.
const OWNED_HOST: &str = "h3";
/// Rounds that each job computes between two events.
const ROUND_COUNT: usize = 20;
/// A search of a few seconds.
const SEARCH: SearchParameters = SearchParameters {
    school: School {
        class_count: 6,
        teacher_count: 8,
        day_count: 5,
        lessons_per_day: 5,
        concurrent_lesson_count: 4,
    },
    kernel_count: 1,
    finish_option: "finish=200",
};

/// A user's virtual machine and the job that runs in it.
struct Session<'a> {
    user: Account,
    vm: Vm<'a>,
    job: RingJob,
}

impl<'a> Session<'a> {
    /// Starts the user's virtual machine, whose resource manager evicts guests.
    fn start_vm(testbed: &'a Testbed, user: Account) -> Vm<'a> {
        let settings = VmSettings {
            rm_command: Some("pvm-rm --policy load".into()),
            ..VmSettings::default()
        };
        let (vm, _) = Vm::start_as(testbed, user, settings).expect("a virtual machine");
        vm.add_hosts(&SLAVES).or_panic_with_logs(&vm);
        vm
    }

    fn start(testbed: &'a Testbed, user: Account) -> Self {
        let vm = Self::start_vm(testbed, user);
        let job = RingJob::start_small(&vm, "ring", OWNED_HOST);
        Self { user, vm, job }
    }

    /// Returns the tid of the job's only worker.
    fn worker(&self) -> String {
        let tasks = self.vm.tasks().or_panic_with_logs(&self.vm);
        let is_worker = |name: &str, tid: &str| name.ends_with("ring_job") && tid != self.job.tid;
        let worker = tasks.iter().find(|task| is_worker(&task.name, &task.tid));
        worker.expect("it runs").tid.clone()
    }

    /// Migrates the worker by hand, unless the resource manager has placed it on the host, and
    /// checks that the job goes on.
    fn migrate_worker(&self, host: &str) {
        let result = self
            .vm
            .migrate_when_ready(&self.worker(), host)
            .or_panic_with_logs(&self.vm);
        assert!(
            result.succeeded() || result.stderr.contains("it already runs there"),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
        self.job.wait_for_rounds(&self.vm, ROUND_COUNT);
    }

    /// Waits until none of this user's tasks is on a host.
    fn wait_until_left(&self, host: &str) {
        let left = wait_for(TIMEOUT, || {
            let tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            let on_host = |task: &&Task| {
                let is_guest = ["ring_job", "tablix2_kernel"]
                    .iter()
                    .any(|name| task.name.ends_with(name));
                is_guest && task.host.as_deref() == Some(host)
            };
            match tasks.iter().find(on_host) {
                None => Ok(()),
                Some(task) => Err(format!("{task:?}")),
            }
        });
        left.or_panic_with_logs(&self.vm);
    }

    /// Checkpoints and ends the job, and restarts it in a new virtual machine.
    fn restart_from_checkpoint(self, testbed: &'a Testbed) -> Self {
        let Self { user, vm, job } = self;
        let values = vm
            .pvm_json(&["checkpoint", "--end", &job.tid])
            .or_panic_with_logs(&vm);
        let checkpoint = values[0]["set"].as_str().expect("a name").to_string();
        let halted = vm.run_pvm(&["halt"]).or_panic_with_logs(&vm);
        assert!(halted.succeeded(), "{halted:?}");
        let vm = Self::start_vm(testbed, user);
        let restarted = vm
            .run_pvm(&["restart", &checkpoint])
            .or_panic_with_logs(&vm);
        assert!(
            restarted.succeeded(),
            "{restarted:?}\n{}",
            vm.events_and_logs()
        );
        job.wait_for_rounds(&vm, ROUND_COUNT);
        Self { user, vm, job }
    }

    /// Asserts that the processes of the job have the user's ids, that each task which the console
    /// shows is a process of the user, and that it shows no job of another user.
    fn check_ids(&self) {
        let home = self.vm.user_home();
        let home = home.to_str().expect("text");
        let (mut ids, mut process_count) = (BTreeSet::new(), 0);
        for host in self.vm.testbed().hosts() {
            let processes = host.processes().into_iter();
            for (pid, _) in processes.filter(|(_, line)| line.contains(home)) {
                // A process that has just ended has no ids.
                if let Ok(metadata) = fs::metadata(format!("/proc/{pid}")) {
                    ids.insert((metadata.uid(), metadata.gid()));
                    process_count += 1;
                }
            }
        }
        let uid = self.user.uid;
        assert_eq!(ids, BTreeSet::from([(uid, uid)]), "{}", self.user.name);
        assert!(process_count >= 2, "{process_count}");
        let tasks = self.vm.tasks().or_panic_with_logs(&self.vm);
        let jobs = tasks.iter().filter(|task| task.name.ends_with("ring_job"));
        assert_eq!(jobs.count(), 2, "{tasks:?}");
        for host in self.vm.testbed().hosts() {
            let uids = uids_by_host_pid(host);
            let is_here = |task: &&Task| task.host.as_deref() == Some(host.name());
            for task in tasks.iter().filter(is_here) {
                // The console of the list itself, for example, has ended.
                if let Some(task_uid) = uids.get(&task.pid) {
                    assert_eq!(*task_uid, uid, "{task:?}");
                }
            }
        }
    }
}

/// Returns the user id of each process of a host, by its process id on the host.
fn uids_by_host_pid(host: &Host) -> BTreeMap<i32, u32> {
    let processes = host.processes().into_iter();
    let entries = processes.filter_map(|(pid, _)| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let fields = |name: &str| -> Option<Vec<i64>> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace()
                .map(|word| word.parse().ok())
                .collect()
        };
        // The process ids of the machine, of the host, and of the namespaces in it.
        let host_pid = *fields("NSpid:")?.get(1)?;
        let uid = *fields("Uid:")?.first()?;
        Some((host_pid.try_into().ok()?, uid.try_into().ok()?))
    });
    entries.collect()
}

/// Calls `action` with each session at the same time.
fn for_each_user(sessions: &[Session<'_>], action: impl Fn(&Session<'_>) + Sync) {
    thread::scope(|scope| {
        for session in sessions {
            scope.spawn(|| action(session));
        }
    });
}

/// Runs `pvm-admin` with these arguments as root on a host.
fn run_admin(testbed: &Testbed, host: usize, arguments: &[&str]) -> CommandResult {
    let program = require_prefix_in_hosts().join("sbin/pvm-admin");
    let mut command = testbed.host(host).root_command(program);
    command.args(arguments);
    run_to_end(command, TIMEOUT).expect("the program ends")
}

/// The owner of h3 logs in: the guests of all users leave the host, and return by hand.
fn evict_by_login(testbed: &Testbed, sessions: &[Session<'_>]) {
    for_each_user(sessions, |session| session.migrate_worker(OWNED_HOST));
    let login = SshLogin::log_in(testbed, "olga", testbed.host(3)).expect("a login");
    for_each_user(sessions, |session| {
        let is_pause = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { .. });
        session
            .vm
            .wait_for_event(TIMEOUT, "stopped guests", |entry| is_pause(&entry.kind))
            .or_panic_with_logs(&session.vm);
        session.wait_until_left(OWNED_HOST);
        session.job.wait_for_rounds(&session.vm, ROUND_COUNT);
        session.check_ids();
    });
    login.log_out().expect("logs out");
}

/// The administrator drains h2: the guests of all users leave it.
fn drain_by_administrator(testbed: &Testbed, sessions: &[Session<'_>]) {
    for_each_user(sessions, |session| session.migrate_worker("h2"));
    let drained = run_admin(testbed, 2, &["drain", "--reason", "new disks"]);
    assert!(drained.succeeded(), "{drained:?}");
    for_each_user(sessions, |session| {
        session.wait_until_left("h2");
        session.job.wait_for_rounds(&session.vm, ROUND_COUNT);
        session.check_ids();
    });
    let ended = run_admin(testbed, 2, &["drain", "--off"]);
    assert!(ended.succeeded(), "{ended:?}");
}

/// Three users compute with rings and with tablix2 while their tasks migrate by hand, before an
/// owner, from checkpoints and before a drain. Each result is right.
#[test]
#[ignore = "system tier: needs root, hosts, CRIU and tablix2"]
fn three_users_share_hosts() {
    for name in TABLIX_PROGRAMS {
        require_program(name, name);
    }
    let testbed = require_testbed(4);
    let key_dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let _services = TaskerServices::start(&testbed, key_dir).expect("the services");
    let sessions = USERS.map(|user| Session::start(&testbed, user));
    for_each_user(&sessions, |session| {
        session.check_ids();
        let search = TablixSearch::start(&session.vm, "school", SEARCH);
        let kernels = search.wait_for_kernels(&session.vm);
        // A kernel that has just opened a file, or ended, stays; the search must succeed anyway.
        let _ = session.vm.migrate(&kernels[0], "h4");
        session.migrate_worker("h4");
        assert_eq!(search.finish(&session.vm).len(), SEARCH.kernel_count);
    });
    evict_by_login(&testbed, &sessions);
    let sessions = sessions.map(|session| session.restart_from_checkpoint(&testbed));
    drain_by_administrator(&testbed, &sessions);
    for_each_user(&sessions, |session| {
        session.job.end_and_check(&session.vm);
    });
    let [first, others @ ..] = &sessions;
    for session in others {
        let halted = session.vm.run_pvm(&["halt"]);
        assert!(halted.is_ok_and(|output| output.succeeded()));
    }
    first.vm.halt_and_wait().expect("halts");
}
