//! Jobs are checkpointed while their tasks exchange messages, lose their tasks or hosts, and are
//! restarted.

mod admission;
mod copies;
mod host_loss;
mod last_messages;
mod limits;
mod matrix;
mod own_state;
mod removal;
mod services;
mod stuck;

use super::scenario::{stop_guests_until, welcome_guests};
use super::sim::{Proc, Received, Sim, host, seeds};
use crate::{HostId, MachineConfig};
use sempa_proto::checkpoint::{
    CheckpointFailure, CheckpointReport, CheckpointSchedule, RestartFailure,
};
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// A simulation with a console and one job; the job's first task has spawned the others.
struct JobScenario {
    sim: Sim,
    console: usize,
    tids: Vec<Tid>,
}

impl JobScenario {
    fn new(seed: u64, hosts: usize, tasks: u32) -> JobScenario {
        JobScenario::with(seed, hosts, tasks, |_| {})
    }

    fn with(
        seed: u64,
        hosts: usize,
        tasks: u32,
        change: impl Fn(&mut MachineConfig),
    ) -> JobScenario {
        let (mut sim, console) = Sim::cluster_with(seed, hosts, change);
        let root = spawn(&mut sim, console, 1)[0];
        let proc = sim.proc_of(root);
        let mut tids = vec![root];
        tids.extend(spawn(&mut sim, proc, tasks - 1));
        JobScenario { sim, console, tids }
    }

    /// Sends the next number from one task to another, if the sender runs.
    fn send_number(&mut self, from: Tid, to: Tid) {
        let proc = self.sim.proc_of(from);
        let p = &self.sim.procs[proc];
        if from == to || p.exited || p.is_frozen() || p.welcome.is_none() {
            return;
        }
        let number = self.sim.procs[proc].sent_counts.entry(to).or_default();
        let body = number.to_be_bytes();
        *number += 1;
        self.sim.send_message(proc, to, &body);
    }

    fn random_task(&mut self) -> Tid {
        self.tids[self.sim.rng.below(self.tids.len() as u64) as usize]
    }

    fn exchange_messages(&mut self, rounds: u64) {
        for _ in 0..rounds {
            let (from, to) = (self.random_task(), self.random_task());
            self.send_number(from, to);
            let wait = Micros(self.sim.rng.below(4_000));
            self.sim.advance(wait);
        }
    }

    /// Asserts that the numbers of each sender arrived once and in order. True if every number that
    /// was sent has arrived.
    fn all_received(&self) -> bool {
        let mut complete = true;
        for to in &self.tids {
            let mut next: BTreeMap<Tid, u32> = BTreeMap::new();
            for seen in &self.sim.procs[self.sim.proc_of(*to)].received {
                if let Received::Message(src, body) = seen {
                    let number = u32::from_be_bytes(body[..4].try_into().expect("four bytes"));
                    let expected = next.entry(*src).or_default();
                    assert_eq!(
                        number, *expected,
                        "from {src} to {to} (seed {})",
                        self.sim.seed
                    );
                    *expected += 1;
                }
            }
            for from in &self.tids {
                let sent_count = self.sim.procs[self.sim.proc_of(*from)]
                    .sent_counts
                    .get(to)
                    .copied()
                    .unwrap_or_default();
                complete &= next.get(from).copied().unwrap_or_default() == sent_count;
            }
        }
        complete
    }

    fn run_until_all_received(&mut self) {
        let end = self.sim.now + Micros::from_secs(60);
        while !self.all_received() {
            assert!(
                self.sim.now < end && self.sim.step(),
                "something was lost (seed {})",
                self.sim.seed
            );
        }
    }

    fn job(&self) -> Tid {
        self.tids[0]
    }

    fn begin_checkpoint(&mut self, every: Option<Micros>) -> RequestId {
        let job = self.job();
        self.sim.request(
            self.console,
            Request::Checkpoint {
                job,
                schedule: every.map(CheckpointSchedule::Every),
                end_job: false,
                wait: true,
            },
        )
    }

    fn checkpoint(&mut self, every: Option<Micros>) -> Result<CheckpointReport, CheckpointFailure> {
        let job = self.job();
        let reply = self.sim.ask(
            self.console,
            Request::Checkpoint {
                job,
                schedule: every.map(CheckpointSchedule::Every),
                end_job: false,
                wait: true,
            },
        );
        let Reply::Checkpointed(result) = reply else {
            panic!("{reply:?}")
        };
        result
    }

    fn signal(&mut self, tid: Tid, signal: i32) {
        assert_eq!(
            self.sim.ask(self.console, Request::Signal { tid, signal }),
            Reply::Done
        );
    }

    fn kill_all(&mut self) {
        for tid in self.tids.clone() {
            let proc = self.sim.proc_of(tid);
            self.sim.exit(proc, 9);
        }
        self.run_until_all_ended();
    }

    fn run_until_all_ended(&mut self) {
        let tids = self.tids.clone();
        self.sim.run_until("all have ended", |sim| {
            tids.iter().all(|tid| !is_listed(sim, *tid))
        });
        self.sim.advance(Micros::from_millis(50));
    }

    fn restart(&mut self, set: &str, on: &[&str]) -> Result<Vec<(Tid, HostId)>, RestartFailure> {
        let on = on.iter().map(|name| name.to_string()).collect();
        let reply = self.sim.ask(
            self.console,
            Request::Restart {
                checkpoint: set.into(),
                host_names: on,
                wait: true,
            },
        );
        let Reply::Restarted(result) = reply else {
            panic!("{reply:?}")
        };
        result.map(|report| report.tasks)
    }

    /// Waits for the reply to a checkpoint request.
    fn await_checkpoint(
        &mut self,
        asked: RequestId,
    ) -> Result<CheckpointReport, CheckpointFailure> {
        let console = self.console;
        self.sim.run_until("the end of the checkpoint", |sim| {
            sim.procs[console].replies.contains_key(&asked)
        });
        match self.sim.procs[console].replies[&asked].clone() {
            Reply::Checkpointed(result) => result,
            other => panic!("{other:?} (seed {})", self.sim.seed),
        }
    }

    /// Requests a checkpoint of which any step may fail. Asserts that all tasks continue, and that
    /// no files are left except those of a complete checkpoint. True if the checkpoint succeeded.
    fn checkpoint_with_faults(&mut self) -> bool {
        self.exchange_messages(30);
        self.sim.random_faults.failed_steps_percent = 8;
        let result = self.checkpoint(None);
        self.sim.random_faults.failed_steps_percent = 0;
        self.run_until_all_connected();
        self.exchange_messages(60);
        self.run_until_all_connected();
        self.run_until_all_received();
        self.sim.advance(Micros::from_secs(2));
        assert_eq!(
            (self.sim.image_store.leftovers(), self.sim.tokens_left()),
            ((0, 0), 0),
            "seed {}",
            self.sim.seed
        );
        result.is_ok()
    }

    /// Repeats a restart, of which any step may fail, until it succeeds. Returns the number of
    /// failures. Asserts that no task runs after a failure.
    fn restart_with_faults(&mut self, set: &str) -> usize {
        let mut bad = 0;
        self.sim.random_faults.failed_steps_percent = 12;
        while self.restart(set, &[]).is_err() {
            bad += 1;
            self.sim.advance(Micros::from_millis(100));
            for tid in &self.tids {
                assert!(
                    !is_listed(&self.sim, *tid),
                    "{tid} was left (seed {})",
                    self.sim.seed
                );
            }
        }
        self.sim.random_faults.failed_steps_percent = 0;
        bad
    }

    /// Restarts a checkpoint, lets all tasks exchange messages, and asserts that no temporary state
    /// of the restart is left.
    fn restart_and_exchange(&mut self, set: &str) {
        self.restart(set, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {})", self.sim.seed));
        self.run_until_all_connected();
        self.exchange_messages(80);
        self.run_until_all_connected();
        let tids = self.tids.clone();
        for (from, to) in tids
            .iter()
            .flat_map(|from| tids.iter().map(move |to| (*from, *to)))
        {
            self.send_number(from, to);
        }
        self.run_until_all_received();
        self.sim.advance(Micros::from_secs(2));
        assert_eq!(
            self.sim.image_store.leftovers(),
            (0, 0),
            "seed {}",
            self.sim.seed
        );
    }

    /// Waits until all tasks run in new processes, in addition to the `before` processes that
    /// existed earlier; then exchanges messages.
    fn run_until_restarted(&mut self, before: usize) {
        let all = before + self.tids.len();
        self.sim
            .run_until("the job runs again", |sim| sim.procs.len() >= all);
        self.run_until_all_connected();
        self.exchange_messages(100);
        self.run_until_all_connected();
        self.run_until_all_received();
    }

    fn run_until_all_connected(&mut self) {
        let tids = self.tids.clone();
        self.sim.run_until("all are back", |sim| {
            tids.iter().all(|tid| is_connected(sim, *tid))
        });
    }
}

/// True if the task runs and its daemon knows it.
fn is_connected(sim: &Sim, tid: Tid) -> bool {
    let proc = &sim.procs[sim.proc_of(tid)];
    let is_alive = sim.nodes[&proc.host].is_alive && !proc.exited;
    is_alive && !proc.is_frozen() && proc.conn.is_some() && proc.welcome.is_some()
}

fn is_listed(sim: &Sim, tid: Tid) -> bool {
    sim.nodes
        .values()
        .filter(|node| node.is_alive)
        .any(|node| node.machine.tasks.get(tid).is_some())
}

fn spawn(sim: &mut Sim, by: usize, count: u32) -> Vec<Tid> {
    spawn_as(
        sim,
        by,
        SpawnRequest {
            file: "child".into(),
            count,
            ..SpawnRequest::default()
        },
    )
}

fn spawn_as(sim: &mut Sim, by: usize, request: SpawnRequest) -> Vec<Tid> {
    let Reply::Spawned(results) = sim.ask(by, Request::Spawn(request)) else {
        panic!("no tasks")
    };
    let tids: Vec<Tid> = results.into_iter().flatten().collect();
    sim.run_until("all are there", |s| {
        tids.iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    tids
}

/// A job that exchanges messages while it is checkpointed continues from the checkpoint without a
/// lost or repeated message.
#[test]
fn restart_continues_from_checkpoint() {
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 4, 6);
        scene.exchange_messages(60);
        let asked = scene.begin_checkpoint(None);
        scene.exchange_messages(120);
        let report = scene
            .await_checkpoint(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut all = scene.tids.clone();
        all.sort_unstable();
        assert_eq!(report.tasks, all, "seed {seed}");
        // The restart undoes all messages that the tasks send after the checkpoint.
        scene.exchange_messages(40);
        scene.kill_all();
        scene.restart_and_exchange(&report.name);
    }
}

/// A checkpoint that fails at any step leaves every task running and no files.
#[test]
fn failed_checkpoint_leaves_tasks_running() {
    let (mut good, mut bad) = (0, 0);
    for seed in seeds(80) {
        let mut scene = JobScenario::new(seed, 3, 5);
        *(if scene.checkpoint_with_faults() {
            &mut good
        } else {
            &mut bad
        }) += 1;
    }
    assert!(good > 5 && bad > 5, "{good} went well, {bad} failed");
}

/// A restart that fails at any step leaves no task running and can be repeated.
#[test]
fn failed_restart_can_be_repeated() {
    let mut bad = 0;
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.exchange_messages(30);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.kill_all();
        bad += scene.restart_with_faults(&report.name);
        scene.run_until_all_connected();
        scene.exchange_messages(60);
        scene.run_until_all_received();
    }
    assert!(bad > 10, "{bad} restarts failed");
}

/// The newest checkpoint of a job is never older than the job's bound or interval.
#[test]
fn checkpoint_age_stays_within_bound() {
    let bound = Micros::from_secs(4);
    for (seed, pace) in seeds(10).flat_map(|seed| {
        [
            (seed, CheckpointSchedule::MaxLoss(bound)),
            (seed, CheckpointSchedule::Every(bound)),
        ]
    }) {
        let mut scene = JobScenario::new(seed, 3, 4);
        let job = scene.job();
        let reply = scene.sim.ask(
            scene.console,
            Request::Checkpoint {
                job,
                schedule: Some(pace),
                end_job: false,
                wait: true,
            },
        );
        assert!(matches!(reply, Reply::Checkpointed(Ok(_))), "{reply:?}");
        let (mut sets, end) = (1, scene.sim.now + Micros::from_secs(60));
        let mut last = scene.sim.now;
        while scene.sim.now < end {
            scene.sim.advance(Micros::from_millis(20));
            if scene.sim.image_store.count() > sets {
                (sets, last) = (scene.sim.image_store.count(), scene.sim.now);
            }
            assert!(
                scene.sim.now.since(last) <= bound,
                "{sets} sets ({pace:?}, seed {seed})"
            );
        }
        assert!(
            sets < 40,
            "not more often than needed: {sets} ({pace:?}, seed {seed})"
        );
    }
}

/// A checkpoint is not restarted while its tasks are alive.
#[test]
fn restart_refused_while_tasks_are_alive() {
    let mut scene = JobScenario::new(1, 2, 3);
    let size = |scene: &mut JobScenario, what: GroupRequest| {
        let proc = scene.sim.proc_of(scene.tids[1]);
        match scene.sim.ask(proc, Request::Group(what)) {
            Reply::Group(GroupReply::Number(number)) => number,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        size(
            &mut scene,
            GroupRequest::Join {
                group: b"us".into()
            }
        ),
        0
    );
    let report = scene.checkpoint(None).expect("nothing stands in the way");
    let Err(RestartFailure::TasksAlive(alive)) = scene.restart(&report.name, &[]) else {
        panic!("it began")
    };
    assert_eq!(alive.len(), 3);
    assert_eq!(
        size(
            &mut scene,
            GroupRequest::Size {
                group: b"us".into()
            }
        ),
        1,
        "who is alive is in its groups"
    );
    scene.kill_all();
    let no_host = scene.restart(&report.name, &["nowhere"]);
    assert_eq!(no_host, Err(RestartFailure::NoHost("nowhere".into())));
    let places = scene.restart(&report.name, &["h2"]).expect("all are gone");
    assert!(places.iter().all(|(_, at)| *at == host(2)), "{places:?}");
}

/// A job that must end with its checkpoint ends when the checkpoint is complete, and not before.
#[test]
fn final_checkpoint_ends_job_when_complete() {
    let mut ended = 0;
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.exchange_messages(30);
        scene.sim.random_faults.failed_steps_percent = 6;
        let job = scene.job();
        let reply = scene.sim.ask(
            scene.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job: true,
                wait: true,
            },
        );
        scene.sim.random_faults.failed_steps_percent = 0;
        let tids = scene.tids.clone();
        match reply {
            Reply::Checkpointed(Ok(report)) => {
                ended += 1;
                scene.sim.run_until("all have ended", |sim| {
                    tids.iter().all(|tid| !is_listed(sim, *tid))
                });
                scene.sim.advance(Micros::from_millis(50));
                scene
                    .restart(&report.name, &[])
                    .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
                scene.run_until_all_connected();
            }
            Reply::Checkpointed(Err(_)) => scene.run_until_all_connected(),
            other => panic!("{other:?}"),
        }
        scene.exchange_messages(40);
        scene.run_until_all_received();
    }
    assert!(ended > 5, "{ended} have ended");
}

/// Guests that are paused for an owner are checkpointed without being resumed.
#[test]
fn paused_guests_are_checkpointed() {
    for seed in seeds(40) {
        let mut scene = JobScenario::new(seed, 3, 6);
        scene.exchange_messages(40);
        let speaker = scene.sim.enrol(host(2));
        assert_eq!(
            scene
                .sim
                .ask(speaker, stop_guests_until(None, EvictionMode::Checkpoint)),
            Reply::Done
        );
        let rounds = scene.sim.rng.below(40);
        scene.exchange_messages(rounds);
        let (job, end) = (scene.job(), seed % 2 == 0);
        let reply = scene.sim.ask(
            scene.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job: end,
                wait: true,
            },
        );
        let Reply::Checkpointed(Ok(report)) = reply else {
            panic!("{reply:?} (seed {seed})")
        };
        if end {
            let on = ["h1", "h3"];
            scene
                .restart(&report.name, &on)
                .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        } else {
            scene.sim.advance(Micros::from_millis(300));
            let there =
                |proc: &&Proc| proc.spawned_tid.is_some() && proc.host == host(2) && !proc.exited;
            assert!(
                scene.sim.procs.iter().filter(there).all(Proc::is_frozen),
                "seed {seed}"
            );
            assert_eq!(scene.sim.ask(speaker, welcome_guests()), Reply::Done);
        }
        scene.run_until_all_connected();
        scene.exchange_messages(60);
        scene.run_until_all_received();
    }
}

/// A task that was restarted alone as a job of its own reaches the other tasks after a restart of
/// the whole job.
#[test]
fn inner_job_restart_keeps_links_to_outer_job() {
    for seed in seeds(40) {
        let mut scene = JobScenario::new(seed, 3, 3);
        scene.exchange_messages(30);
        let (root, alone) = (scene.tids[0], scene.tids[1]);
        let reply = scene.sim.ask(
            scene.console,
            Request::Checkpoint {
                job: alone,
                schedule: None,
                end_job: true,
                wait: true,
            },
        );
        let Reply::Checkpointed(Ok(small)) = reply else {
            panic!("{reply:?} (seed {seed})")
        };
        assert_eq!(small.tasks, [alone]);
        scene
            .sim
            .run_until("it has ended", |sim| !is_listed(sim, alone));
        scene.sim.advance(Micros::from_millis(50));
        scene
            .restart(&small.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        // In every second run the restarted task and the first task exchange no messages in
        // between.
        if seed % 2 == 0 {
            scene.send_number(alone, root);
            scene.sim.advance(Micros::from_millis(30));
        }
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(report.tasks.len(), 3);
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        let last = |sim: &Sim, at: Tid, from: Tid| {
            let mut seen = sim.procs[sim.proc_of(at)].received.iter().rev();
            seen.any(|seen| *seen == Received::Message(from, bytes::Bytes::from_static(b"after")))
        };
        let (one, other) = (scene.sim.proc_of(alone), scene.sim.proc_of(root));
        scene.sim.send_message(one, root, b"after");
        scene
            .sim
            .run_until("the root has heard it", |sim| last(sim, root, alone));
        scene.sim.send_message(other, alone, b"after");
        scene
            .sim
            .run_until("it has heard the root", |sim| last(sim, alone, root));
    }
}

/// Tasks outside a job exchange messages with its tasks after a restart.
#[test]
fn outsiders_reach_restarted_tasks() {
    for seed in seeds(40) {
        let mut scene = JobScenario::new(seed, 3, 3);
        let (outside, inside) = (scene.sim.procs[scene.console].tid(), scene.tids[1]);
        for _ in 0..5 {
            scene.send_number(outside, inside);
            scene.send_number(inside, outside);
            scene.sim.advance(Micros::from_millis(2));
        }
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        for _ in 0..7 {
            scene.send_number(inside, outside);
            scene.send_number(outside, inside);
        }
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        let heard = |sim: &Sim, at: Tid, from: Tid| {
            let numbers = sim.procs[sim.proc_of(at)]
                .received
                .iter()
                .filter_map(move |seen| match seen {
                    Received::Message(src, body) if *src == from => Some(u32::from_be_bytes(
                        body[..4].try_into().expect("four bytes"),
                    )),
                    _ => None,
                });
            numbers
                .filter(|number| *number >= 1000)
                .collect::<Vec<u32>>()
        };
        // A peer that was notified of the exit considers the task dead until the task sends a
        // message.
        let proc = scene.sim.proc_of(inside);
        scene
            .sim
            .send_message(proc, outside, &1000u32.to_be_bytes());
        scene
            .sim
            .run_until("it has spoken", |sim| heard(sim, outside, inside) == [1000]);
        for number in 1001..1010u32 {
            let proc = scene.sim.proc_of(inside);
            scene.sim.send_message(proc, outside, &number.to_be_bytes());
            scene.sim.advance(Micros::from_millis(1));
            scene
                .sim
                .send_message(scene.console, inside, &number.to_be_bytes());
        }
        let all: Vec<u32> = (1000..1010).collect();
        scene.sim.run_until("both have heard all", |sim| {
            heard(sim, outside, inside) == all && heard(sim, inside, outside) == all[1..]
        });
    }
}
