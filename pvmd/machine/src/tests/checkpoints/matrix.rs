//! Injects a fault of each kind into each party of a checkpoint and of a restart, before and after
//! each message that a daemon handles. The machines themselves enumerate the messages: a new one is
//! covered without a change here.

use super::{Scene, is_back, is_listed, lost};
use crate::HostId;
use crate::tests::sim::seeds;
use crate::tests::sim::strikes::{A_MOMENT, Blow, LONG, Party};
use crate::tests::sim::words::Spot;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// Runs per fault and point. Delays and the choice among equal messages are random.
const TRIES: u64 = 4;
/// Long enough that no periodic checkpoint begins.
const SELDOM: Micros = Micros::from_secs(100_000);
/// Each on a host of its own, the first one on the master.
const TASKS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Of a job that goes back when it loses a host.
    Checkpoint,
    /// Of a job that does not go back.
    Restart,
}

/// Victims: a host with a task of the job, its tasker and engine, and the master.
const PARTIES: [Party; 4] = [
    Party::Source,
    Party::Master,
    Party::SourceTasker,
    Party::SourceEngine,
];

type Fault = (Spot, usize, Party, Blow);

/// A checkpoint or restart in progress.
struct Trial {
    scene: Scene,
    what: What,
    /// The checkpoint that existed before.
    first: String,
    asked: RequestId,
}

impl Trial {
    fn new(what: What, seed: u64, fault: Option<Fault>) -> Trial {
        let mut scene = Scene::new(seed, 4, TASKS);
        scene.chatter(10);
        let every = (what == What::Checkpoint).then_some(SELDOM);
        let first = scene
            .checkpoint(every)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        scene.chatter(10);
        if what == What::Restart {
            scene.end_all();
        }
        scene.sim.listen(fault);
        let asked = match what {
            What::Checkpoint => scene.begin_checkpoint(None),
            What::Restart => {
                let again = Request::Restart {
                    checkpoint: first.clone(),
                    on: Vec::new(),
                    wait: true,
                };
                scene.sim.request(scene.console, again)
            }
        };
        Trial {
            scene,
            what,
            first,
            asked,
        }
    }

    fn is_over(&self) -> bool {
        self.scene.sim.procs[self.scene.console]
            .replies
            .contains_key(&self.asked)
    }

    /// Returns how often each point is reached without a fault.
    fn places(what: What, seed: u64) -> BTreeMap<Spot, usize> {
        let mut trial = Trial::new(what, seed, None);
        while !trial.is_over() {
            trial.scene.chatter(1);
        }
        trial.scene.sim.words.said.clone()
    }

    fn until_struck(&mut self, case: &str) {
        for _ in 0..2000 {
            if self.scene.sim.strikes.struck {
                return self.scene.chatter(10);
            }
            self.scene.chatter(1);
        }
        panic!("it never came there: {case}");
    }

    fn all_run(&self) -> bool {
        self.scene
            .tids
            .iter()
            .all(|tid| is_back(&self.scene.sim, *tid))
    }

    /// Waits until the request is answered and the victim is back or removed. True if the request
    /// succeeded.
    fn comes_to_rest(&mut self, case: &str) -> bool {
        let (console, asked) = (self.scene.console, self.asked);
        self.scene
            .sim
            .until(case, |sim| sim.procs[console].replies.contains_key(&asked));
        self.scene.sim.pass(LONG + Micros::from_secs(20));
        match &self.scene.sim.procs[console].replies[&asked] {
            Reply::Checkpointed(result) => result.is_ok(),
            Reply::Restarted(result) => result.is_ok(),
            other => panic!("{other:?}: {case}"),
        }
    }

    /// Lets all tasks exchange messages and asserts that no message is lost and no file is left.
    fn goes_on(&mut self, case: &str) {
        assert!(
            self.all_run(),
            "not all run: {case}\n{}",
            self.scene.sim.story()
        );
        self.scene.chatter(40);
        self.scene.until_all_is_heard();
        self.scene.sim.pass(Micros::from_secs(2));
        let nodes = &self.scene.sim.nodes;
        let left = self.scene.sim.sets.left_on(|on| nodes[&on].alive);
        let (drafts, _) = self.scene.sim.sets.left();
        assert_eq!(
            (left, drafts, self.scene.sim.tokens_left()),
            (0, 0, 0),
            "something is left: {case}"
        );
    }

    /// Kills the job and restarts it from the newest checkpoint.
    fn begins_again(&mut self, case: &str) {
        let set = self.scene.sim.sets.newest();
        self.scene.sim.engines_anew();
        self.scene.end_all();
        self.scene
            .restart(&set, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}\n{}", self.scene.sim.story()));
        self.scene.until_all_are_back();
        self.goes_on(case);
    }

    fn judge(&mut self, party: Party, blow: Blow, case: &str) {
        let good = self.comes_to_rest(case);
        let tasks_die =
            is_gone(party, blow) || (party == Party::SourceTasker && blow == Blow::Kill);
        match self.what {
            What::Checkpoint => {
                // A checkpoint that was being sealed when the job went back is complete, too.
                let sets = self.scene.sim.sets.count();
                assert!(
                    sets == 1 + usize::from(good) || tasks_die && sets == 2,
                    "{sets} sets: {case}"
                );
                self.goes_on(case);
            }
            What::Restart if good && (self.all_run() || !tasks_die) => self.goes_on(case),
            What::Restart => {
                let runs = |tid: &&Tid| is_listed(&self.scene.sim, **tid);
                let left: Vec<&Tid> = self.scene.tids.iter().filter(runs).collect();
                assert!(
                    good || left.is_empty(),
                    "{left:?} run: {case}\n{}",
                    self.scene.sim.story()
                );
            }
        }
        self.begins_again(case);
    }

    /// Everything ended with the master. The job is restarted from the store in a new virtual
    /// machine.
    fn judge_without_master(mut self, case: &str) {
        self.scene.sim.pass(LONG + Micros::from_secs(20));
        let nodes = &self.scene.sim.nodes;
        let left: Vec<HostId> = nodes
            .iter()
            .filter(|(_, n)| n.alive)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(left, [], "{case}");
        let (newest, count) = (self.scene.sim.sets.newest(), self.scene.sim.sets.count());
        assert!(
            count == 1 || self.what == What::Checkpoint,
            "{count} sets: {case}"
        );
        assert!(count == 1 || newest != self.first, "{case}");
        let mut scene = lost(self.scene);
        scene
            .restart(&newest, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}"));
        scene.until_all_are_back();
        scene.chatter(40);
        scene.until_all_is_heard();
    }
}

/// True if other hosts consider a host with this fault lost.
fn is_gone(party: Party, blow: Blow) -> bool {
    let lasts = !matches!(blow, Blow::Stop(A_MOMENT) | Blow::Cut(A_MOMENT));
    matches!(party, Party::Source | Party::Master) && lasts
}

fn try_all(what: What) {
    let mut tried = 0;
    for (n, (spot, times)) in Trial::places(what, 1).into_iter().enumerate() {
        for party in PARTIES {
            for blow in party.blows() {
                for seed in seeds(TRIES + 1) {
                    // With other delays a message may be handled less often.
                    let nth = (seed as usize - 1) * (times - 1) / 2 % times;
                    let case = format!(
                        "{what:?}: {party:?}, {blow:?}, {spot:?} for the {nth}th time, seed {seed}"
                    );
                    let seed = seed * 1000 + n as u64;
                    let mut trial = Trial::new(what, seed, Some((spot.clone(), nth, party, blow)));
                    trial.until_struck(&case);
                    tried += 1;
                    if party == Party::Master && blow == Blow::Kill {
                        trial.judge_without_master(&case);
                    } else {
                        trial.judge(party, blow, &case);
                    }
                }
            }
        }
    }
    assert!(tried > 200, "{tried} tried");
}

/// After any fault of any victim at any message of a checkpoint, the job continues and all
/// checkpoints are complete.
#[test]
fn job_survives_any_fault_during_checkpoint() {
    try_all(What::Checkpoint);
}

/// After any fault of any victim at any message of a restart, the job runs once or not at all and
/// can be restarted.
#[test]
fn job_runs_at_most_once_after_any_restart_fault() {
    try_all(What::Restart);
}
