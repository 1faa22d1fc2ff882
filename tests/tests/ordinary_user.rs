//! An ordinary user gets a virtual machine; only moves need more rights, and the refusal says so.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Refusal};
use sempa_tests::Vm;
use sempa_tests::needs::testbed;
use sempa_tests::run::must;
use sempa_tests::vm::Settings;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

#[test]
fn an_ordinary_user_runs_tasks_and_is_told_why_they_can_neither_move_nor_be_checkpointed() {
    let Some((bed, _)) = testbed(2) else { return };
    let vm = Vm::start(&bed, Settings { as_alice: true, ..Settings::default() }).expect("a virtual machine");
    vm.add(&["h2"]).expect("h2 joins");
    let program = vm.program("hold").expect("gcc");
    let tid = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    let mut ask = vm.command(bed.host(1), program);
    ask.args(["ask", &tid]);
    let done = must(ask, SOON).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    assert!(done.out.contains("sum GOOD"), "{done:?}");
    let refused = vm.migrate(&tid, "h1").expect("ends");
    assert!(!refused.good() && refused.err.lines().count() == 1, "{refused:?}");
    assert_eq!(vm.host_of(&tid).expect("alive"), "h2");
    let entry = vm
        .event(SOON, "refused move", |entry| matches!(entry.kind, EventKind::MoveFailed { .. }))
        .unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
    let EventKind::MoveFailed { why: Failure::Refused(reasons), .. } = &entry.kind else { panic!("{entry:?}") };
    assert!(reasons.iter().any(|reason| matches!(reason, Refusal::NoEngine { .. })), "{reasons:?}");
    let none = vm.pvm(&["checkpoint", &tid]).expect("ends");
    assert!(
        !none.good() && none.err.contains("cannot dump or restore") && none.err.contains("the job goes on"),
        "{none:?}"
    );
    let mut ask = vm.command(bed.host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
    ask.args(["ask", &tid]);
    assert!(must(ask, SOON).expect("it answers").out.contains("sum GOOD"));
    vm.halt().expect("halts");
}
