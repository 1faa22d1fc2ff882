//! What the earlier processes of a restarted job have left behind.

use super::JobScenario;
use crate::tests::sim::seeds;

/// Processes that a task of the job has left behind are killed before any restarted task runs. The
/// simulation asserts this when a restored process begins to run.
#[test]
fn restarted_tasks_find_no_second_copies_of_children() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let checkpoint = scenario.checkpoint(None);
        let name = checkpoint
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        let tids = scenario.tids.clone();
        for tid in &tids {
            let proc = scenario.sim.proc_of(*tid);
            scenario.sim.exit_and_leave_processes(proc, 2);
        }
        scenario.run_until_all_ended();
        assert_eq!(scenario.sim.leftovers.len(), tids.len(), "seed {seed}");
        scenario.restart_and_exchange(&name);
        assert!(scenario.sim.leftovers.is_empty(), "seed {seed}");
    }
}
