//! An ordinary user can use a virtual machine. Only migrations and checkpoints need more rights;
//! they are refused with this reason. Also tests which rights the programs of root keep.

use nix::unistd::Pid;
use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Refusal};
use sempa_tests::OrPanicWithLogs;
use sempa_tests::Vm;
use sempa_tests::faults::daemon_of;
use sempa_tests::migration_steps::{Victim, process_of};
use sempa_tests::requirements::testbed;
use sempa_tests::run::run_ok;
use sempa_tests::vm::Settings;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Size in bytes of the kernel's buffer for a UDP port of root's daemons. The kernel doubles the
/// requested number.
const UDP_BUFFER_BYTES: usize = 8 << 20;

/// Tasks of an ordinary user run. A migration or a checkpoint is refused with the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_tasks_run_and_do_not_migrate() {
    let bed = testbed(2);
    let vm = Vm::start(
        &bed,
        Settings {
            as_alice: true,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2"]).expect("h2 joins");
    let program = vm.compile_program("hold").expect("gcc");
    let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    let mut ask = vm.command(bed.host(1), program);
    ask.args(["ask", &tid]);
    let done = run_ok(ask, TIMEOUT).or_panic_with_logs(&vm);
    assert!(done.out.contains("sum GOOD"), "{done:?}");
    let refused = vm.migrate(&tid, "h1").expect("ends");
    assert!(
        !refused.succeeded() && refused.err.lines().count() == 1,
        "{refused:?}"
    );
    assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
    let entry = vm
        .wait_for_event(TIMEOUT, "refused move", |entry| {
            matches!(entry.kind, EventKind::MigrationFailed { .. })
        })
        .or_panic_with_logs(&vm);
    let EventKind::MigrationFailed {
        why: Failure::Refused(reasons),
        ..
    } = &entry.kind
    else {
        panic!("{entry:?}")
    };
    // The message lists the alternatives. tests/tests/engines.rs tests the second one.
    let hint = |why: &str| {
        why.contains("run the daemon as root")
            && why.contains("SEMPA_ENGINE")
            && !why.contains("CAP_")
    };
    assert!(
        reasons
            .iter()
            .any(|reason| matches!(reason, Refusal::NoEngine { why, .. } if hint(why))),
        "{reasons:?}"
    );
    let none = vm.pvm(&["checkpoint", &tid]).expect("ends");
    assert!(
        !none.succeeded()
            && none.err.contains("cannot dump or restore")
            && none.err.contains("the job continues"),
        "{none:?}"
    );
    let mut ask = vm.command(bed.host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    ask.args(["ask", &tid]);
    assert!(
        run_ok(ask, TIMEOUT)
            .expect("it answers")
            .out
            .contains("sum GOOD")
    );
    vm.halt().expect("halts");
}

/// Returns the set of capabilities of a process with this name in its status file, as a bit mask.
fn capabilities(pid: Pid, name: &str) -> u64 {
    let status = Process::new(pid.as_raw()).and_then(|process| process.status());
    let status = status.unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let set = match name {
        "CapInh" => Some(status.capinh),
        "CapPrm" => Some(status.capprm),
        "CapEff" => Some(status.capeff),
        "CapBnd" => status.capbnd,
        "CapAmb" => status.capamb,
        _ => None,
    };
    set.expect("a set of that name")
}

/// Daemon and tasker of root keep only the capabilities that they need. Tasks have all
/// capabilities, even after a migration.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn roots_daemons_drop_capabilities_tasks_keep_them() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("h2 joins");
    vm.compile_program("hold").expect("gcc");
    let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    let task = |host: usize| {
        let line = |(pid, line): (u32, String)| {
            line.ends_with("/hold 1")
                .then_some(Pid::from_raw(pid.cast_signed()))
        };
        bed.host(host)
            .processes()
            .into_iter()
            .find_map(line)
            .expect("it runs there")
    };
    let all = capabilities(Pid::this(), "CapBnd");
    let keeps_all = |host: usize| {
        for name in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(
                capabilities(task(host), name),
                all,
                "{name} of a task of root on h{host}"
            );
        }
    };
    // Numbers of capabilities that no daemon or tasker keeps: those for other processes, networks,
    // modules, devices, clocks and the whole machine.
    let never = [
        12, 13, 14, 15, 16, 17, 20, 22, 25, 26, 27, 29, 30, 33, 34, 35, 36, 38, 39,
    ];
    let never = never.iter().fold(0, |set, one| set | 1_u64 << one);
    let of_the_tasker = [19, 21, 40].iter().fold(0, |set, one| set | 1_u64 << one);
    for host in bed.hosts() {
        let daemon = daemon_of(host).expect("a daemon");
        let tasker = process_of(host, Victim::TargetTasker).expect("a tasker");
        for name in ["CapPrm", "CapEff"] {
            assert_eq!(
                capabilities(daemon, name) & (never | of_the_tasker),
                0,
                "{name} of the daemon on {}",
                host.name()
            );
            assert_eq!(
                capabilities(tasker, name) & never,
                0,
                "{name} of the tasker on {}",
                host.name()
            );
            assert_eq!(
                capabilities(tasker, name) & of_the_tasker,
                all & of_the_tasker,
                "{name} on {}",
                host.name()
            );
        }
        // The daemon has dropped the capability for this buffer size. So the buffer, which is
        // larger than ordinary users may have, shows that the size was set before.
        let ports = host.shell("ss -Huanm", TIMEOUT).expect("iproute2").out;
        assert!(
            ports.contains(&format!("rb{}", 2 * UDP_BUFFER_BYTES)),
            "{}: {ports}",
            host.name()
        );
    }
    keeps_all(2);
    vm.must_migrate(&tid, "h1");
    keeps_all(1);
    vm.halt().expect("halts");
}
