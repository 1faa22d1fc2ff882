//! Checkpoints, host losses and restarts of jobs whose tasks exchange messages.

mod admission;
mod claims;
mod copies;
mod damage;
mod host_loss;
mod last_messages;
mod leftovers;
mod limits;
mod matrix;
mod own_state;
mod removal;
mod services;
mod stuck;

use super::scenario::{evict_guests_request, welcome_guests_request};
use super::sim::{Proc, Received, Sim, host, seeds};
use crate::{Event, HostId, MachineConfig};
use sempa_proto::checkpoint::{
    CheckpointFailure, CheckpointReport, CheckpointSchedule, RestartFailure,
};
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// A simulation with a console and one job. The job's first task has spawned the other tasks.
struct JobScenario {
    sim: Sim,
    console: usize,
    tids: Vec<Tid>,
}

impl JobScenario {
    fn new(seed: u64, hosts: usize, tasks: u32) -> Self {
        Self::with_config(seed, hosts, tasks, |_| {})
    }

    fn with_config(
        seed: u64,
        hosts: usize,
        tasks: u32,
        configure: impl Fn(&mut MachineConfig),
    ) -> Self {
        let (mut sim, console) = Sim::cluster_with(seed, hosts, configure);
        let root_tid = spawn_children(&mut sim, console, 1)[0];
        let proc = sim.proc_of(root_tid);
        let mut tids = vec![root_tid];
        tids.extend(spawn_children(&mut sim, proc, tasks - 1));
        Self { sim, console, tids }
    }

    /// Sends the next number of this pair from one task to another, if the sender runs.
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

    fn exchange_messages(&mut self, message_count: u64) {
        for _ in 0..message_count {
            let (from, to) = (self.random_task(), self.random_task());
            self.send_number(from, to);
            let delay = Micros(self.sim.rng.below(4_000));
            self.sim.advance(delay);
        }
    }

    /// Asserts that the numbers of each sender arrived once and in order. Returns true if every
    /// number that was sent has arrived.
    fn check_all_received(&self) -> bool {
        let mut all_arrived = true;
        for to in &self.tids {
            let mut next_numbers: BTreeMap<Tid, u32> = BTreeMap::new();
            for item in &self.sim.procs[self.sim.proc_of(*to)].received {
                if let Received::Message(src, body) = item {
                    let number = u32::from_be_bytes(body[..4].try_into().expect("four bytes"));
                    let next_number = next_numbers.entry(*src).or_default();
                    assert_eq!(
                        number, *next_number,
                        "from {src} to {to} (seed {})",
                        self.sim.seed
                    );
                    *next_number += 1;
                }
            }
            for from in &self.tids {
                let sent_count = self.sim.procs[self.sim.proc_of(*from)]
                    .sent_counts
                    .get(to)
                    .copied()
                    .unwrap_or_default();
                all_arrived &= next_numbers.get(from).copied().unwrap_or_default() == sent_count;
            }
        }
        all_arrived
    }

    fn run_until_all_received(&mut self) {
        let end = self.sim.now + Micros::from_secs(60);
        while !self.check_all_received() {
            assert!(
                self.sim.now < end && self.sim.step(),
                "something was lost (seed {})",
                self.sim.seed
            );
        }
    }

    fn job_tid(&self) -> Tid {
        self.tids[0]
    }

    fn begin_checkpoint(&mut self, interval: Option<Micros>) -> RequestId {
        let job = self.job_tid();
        self.sim.request(
            self.console,
            Request::Checkpoint {
                job,
                schedule: interval.map(CheckpointSchedule::Interval),
                end_job: false,
                wait_for_end: true,
            },
        )
    }

    fn checkpoint(
        &mut self,
        interval: Option<Micros>,
    ) -> Result<CheckpointReport, CheckpointFailure> {
        let job = self.job_tid();
        let reply = self.sim.ask(
            self.console,
            Request::Checkpoint {
                job,
                schedule: interval.map(CheckpointSchedule::Interval),
                end_job: false,
                wait_for_end: true,
            },
        );
        let Reply::Checkpointed(result) = reply else {
            panic!("{reply:?}")
        };
        result
    }

    fn send_signal(&mut self, tid: Tid, signal: i32) {
        assert_eq!(
            self.sim.ask(self.console, Request::Signal { tid, signal }),
            Reply::Done
        );
    }

    fn kill_all_tasks(&mut self) {
        for tid in self.tids.clone() {
            let proc = self.sim.proc_of(tid);
            self.sim.exit_proc(proc, 9);
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

    fn restart(
        &mut self,
        checkpoint_name: &str,
        host_names: &[&str],
    ) -> Result<Vec<(Tid, HostId)>, RestartFailure> {
        let host_names = host_names.iter().map(|name| name.to_string()).collect();
        let reply = self.sim.ask(
            self.console,
            Request::Restart {
                checkpoint: checkpoint_name.into(),
                host_names,
                wait_for_end: true,
                force: false,
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
        checkpoint_request: RequestId,
    ) -> Result<CheckpointReport, CheckpointFailure> {
        let console = self.console;
        self.sim.run_until("the end of the checkpoint", |sim| {
            sim.procs[console].replies.contains_key(&checkpoint_request)
        });
        match self.sim.procs[console].replies[&checkpoint_request].clone() {
            Reply::Checkpointed(result) => result,
            other => panic!("{other:?} (seed {})", self.sim.seed),
        }
    }

    /// Requests a checkpoint in which any step may fail. Asserts that all tasks continue and that
    /// only the files of complete checkpoints remain. Returns true if the checkpoint succeeded.
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
            (
                self.sim.image_store.leftover_counts(),
                self.sim.resume_token_count()
            ),
            ((0, 0), 0),
            "seed {}",
            self.sim.seed
        );
        result.is_ok()
    }

    /// Repeats a restart in which any step may fail until the restart succeeds. Returns the number
    /// of failures. Asserts that no task runs after a failure.
    fn restart_with_faults(&mut self, checkpoint_name: &str) -> usize {
        let mut failure_count = 0;
        self.sim.random_faults.failed_steps_percent = 12;
        while self.restart(checkpoint_name, &[]).is_err() {
            failure_count += 1;
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
        failure_count
    }

    /// Restarts a checkpoint and lets all tasks exchange messages. Asserts that no images, drafts
    /// or resume tokens of the restart remain.
    fn restart_and_exchange(&mut self, checkpoint_name: &str) {
        self.restart(checkpoint_name, &[])
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
            self.sim.image_store.leftover_counts(),
            (0, 0),
            "seed {}",
            self.sim.seed
        );
    }

    /// Waits until all tasks run in new processes, then exchanges messages. `process_count` is the
    /// number of processes that existed before the restart.
    fn run_until_restarted(&mut self, process_count: usize) {
        let expected_count = process_count + self.tids.len();
        self.sim.run_until("the job runs again", |sim| {
            sim.procs.len() >= expected_count
        });
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

/// True if the task runs and its daemon has accepted its connection.
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

/// Lets the master find the loss of a host at once.
fn report_loss(sim: &mut Sim, host: HostId) {
    let why = "its session broke".into();
    sim.handle(HostId::MASTER, Event::HostLost { host, why });
}

fn spawn_children(sim: &mut Sim, spawner: usize, count: u32) -> Vec<Tid> {
    spawn_as(
        sim,
        spawner,
        SpawnRequest {
            program: "child".into(),
            task_count: count,
            ..SpawnRequest::default()
        },
    )
}

fn spawn_as(sim: &mut Sim, spawner: usize, request: SpawnRequest) -> Vec<Tid> {
    let Reply::Spawned(results) = sim.ask(spawner, Request::Spawn(request)) else {
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
        let mut scenario = JobScenario::new(seed, 4, 6);
        scenario.exchange_messages(60);
        let checkpoint_request = scenario.begin_checkpoint(None);
        scenario.exchange_messages(120);
        let report = scenario
            .await_checkpoint(checkpoint_request)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut sorted_tids = scenario.tids.clone();
        sorted_tids.sort_unstable();
        assert_eq!(report.tasks, sorted_tids, "seed {seed}");
        // The restart undoes the messages that the tasks send after the checkpoint.
        scenario.exchange_messages(40);
        scenario.kill_all_tasks();
        scenario.restart_and_exchange(&report.name);
    }
}

#[test]
fn failed_checkpoint_leaves_tasks_running() {
    let (mut success_count, mut failure_count) = (0, 0);
    for seed in seeds(80) {
        let mut scenario = JobScenario::new(seed, 3, 5);
        *(if scenario.checkpoint_with_faults() {
            &mut success_count
        } else {
            &mut failure_count
        }) += 1;
    }
    assert!(
        success_count > 5 && failure_count > 5,
        "{success_count} went well, {failure_count} failed"
    );
}

#[test]
fn failed_restart_can_be_repeated() {
    let mut failure_count = 0;
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.exchange_messages(30);
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.kill_all_tasks();
        failure_count += scenario.restart_with_faults(&report.name);
        scenario.run_until_all_connected();
        scenario.exchange_messages(60);
        scenario.run_until_all_received();
    }
    assert!(failure_count > 10, "{failure_count} restarts failed");
}

/// The newest checkpoint of a job is never older than the maximum age or the interval in the job's
/// schedule.
#[test]
fn checkpoint_age_stays_within_bound() {
    let age_max = Micros::from_secs(4);
    for (seed, schedule) in seeds(10).flat_map(|seed| {
        [
            (seed, CheckpointSchedule::MaxLoss(age_max)),
            (seed, CheckpointSchedule::Interval(age_max)),
        ]
    }) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let job = scenario.job_tid();
        let reply = scenario.sim.ask(
            scenario.console,
            Request::Checkpoint {
                job,
                schedule: Some(schedule),
                end_job: false,
                wait_for_end: true,
            },
        );
        assert!(matches!(reply, Reply::Checkpointed(Ok(_))), "{reply:?}");
        let (mut checkpoint_count, end_time) = (1, scenario.sim.now + Micros::from_secs(60));
        let mut last_checkpoint_time = scenario.sim.now;
        while scenario.sim.now < end_time {
            scenario.sim.advance(Micros::from_millis(20));
            if scenario.sim.image_store.checkpoint_count() > checkpoint_count {
                (checkpoint_count, last_checkpoint_time) = (
                    scenario.sim.image_store.checkpoint_count(),
                    scenario.sim.now,
                );
            }
            assert!(
                scenario.sim.now.since(last_checkpoint_time) <= age_max,
                "{checkpoint_count} sets ({schedule:?}, seed {seed})"
            );
        }
        assert!(
            checkpoint_count < 40,
            "not more often than needed: {checkpoint_count} ({schedule:?}, seed {seed})"
        );
    }
}

#[test]
fn restart_refused_while_tasks_are_alive() {
    let mut scenario = JobScenario::new(1, 2, 3);
    let group_result = |scenario: &mut JobScenario, request: GroupRequest| {
        let proc = scenario.sim.proc_of(scenario.tids[1]);
        match scenario.sim.ask(proc, Request::Group(request)) {
            Reply::Group(GroupReply::Number(group_number)) => group_number,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        group_result(
            &mut scenario,
            GroupRequest::Join {
                group: b"us".into()
            }
        ),
        0
    );
    let report = scenario
        .checkpoint(None)
        .expect("nothing stands in the way");
    let Err(RestartFailure::TasksAlive(live_tasks)) = scenario.restart(&report.name, &[]) else {
        panic!("it began")
    };
    assert_eq!(live_tasks.len(), 3);
    assert_eq!(
        group_result(
            &mut scenario,
            GroupRequest::Size {
                group: b"us".into()
            }
        ),
        1,
        "who is alive is in its groups"
    );
    scenario.kill_all_tasks();
    let no_host_result = scenario.restart(&report.name, &["nowhere"]);
    assert_eq!(
        no_host_result,
        Err(RestartFailure::NoHost("nowhere".into()))
    );
    let task_hosts = scenario
        .restart(&report.name, &["h2"])
        .expect("all are gone");
    assert!(
        task_hosts.iter().all(|(_, host_id)| *host_id == host(2)),
        "{task_hosts:?}"
    );
}

/// A job that must end with its checkpoint ends when the checkpoint is complete, and never earlier.
#[test]
fn final_checkpoint_ends_job_when_complete() {
    let mut ended_count = 0;
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.exchange_messages(30);
        scenario.sim.random_faults.failed_steps_percent = 6;
        let job = scenario.job_tid();
        let reply = scenario.sim.ask(
            scenario.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job: true,
                wait_for_end: true,
            },
        );
        scenario.sim.random_faults.failed_steps_percent = 0;
        let tids = scenario.tids.clone();
        match reply {
            Reply::Checkpointed(Ok(report)) => {
                ended_count += 1;
                scenario.sim.run_until("all have ended", |sim| {
                    tids.iter().all(|tid| !is_listed(sim, *tid))
                });
                scenario.sim.advance(Micros::from_millis(50));
                scenario
                    .restart(&report.name, &[])
                    .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
                scenario.run_until_all_connected();
            }
            Reply::Checkpointed(Err(_)) => scenario.run_until_all_connected(),
            other => panic!("{other:?}"),
        }
        scenario.exchange_messages(40);
        scenario.run_until_all_received();
    }
    assert!(ended_count > 5, "{ended_count} have ended");
}

/// Guests that are paused for an owner are checkpointed. If the job continues, the guests stay
/// paused. If the job ends, it can be restarted on other hosts.
#[test]
fn paused_guests_are_checkpointed() {
    for seed in seeds(40) {
        let mut scenario = JobScenario::new(seed, 3, 6);
        scenario.exchange_messages(40);
        let owner_agent = scenario.sim.enrol(host(2));
        assert_eq!(
            scenario.sim.ask(
                owner_agent,
                evict_guests_request(None, EvictionMode::Checkpoint)
            ),
            Reply::Done
        );
        let rounds = scenario.sim.rng.below(40);
        scenario.exchange_messages(rounds);
        let (job, end_job) = (scenario.job_tid(), seed % 2 == 0);
        let reply = scenario.sim.ask(
            scenario.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job,
                wait_for_end: true,
            },
        );
        let Reply::Checkpointed(Ok(report)) = reply else {
            panic!("{reply:?} (seed {seed})")
        };
        if end_job {
            let host_names = ["h1", "h3"];
            scenario
                .restart(&report.name, &host_names)
                .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        } else {
            scenario.sim.advance(Micros::from_millis(300));
            let is_on_h2 =
                |proc: &&Proc| proc.spawned_tid.is_some() && proc.host == host(2) && !proc.exited;
            assert!(
                scenario
                    .sim
                    .procs
                    .iter()
                    .filter(is_on_h2)
                    .all(Proc::is_frozen),
                "seed {seed}"
            );
            assert_eq!(
                scenario.sim.ask(owner_agent, welcome_guests_request()),
                Reply::Done
            );
        }
        scenario.run_until_all_connected();
        scenario.exchange_messages(60);
        scenario.run_until_all_received();
    }
}

/// A task is restarted alone as a job of its own. After a restart of the whole job, the task
/// exchanges messages with the other tasks.
#[test]
fn inner_job_restart_keeps_links_to_outer_job() {
    for seed in seeds(40) {
        let mut scenario = JobScenario::new(seed, 3, 3);
        scenario.exchange_messages(30);
        let (root_tid, inner_tid) = (scenario.tids[0], scenario.tids[1]);
        let reply = scenario.sim.ask(
            scenario.console,
            Request::Checkpoint {
                job: inner_tid,
                schedule: None,
                end_job: true,
                wait_for_end: true,
            },
        );
        let Reply::Checkpointed(Ok(inner_report)) = reply else {
            panic!("{reply:?} (seed {seed})")
        };
        assert_eq!(inner_report.tasks, [inner_tid]);
        scenario
            .sim
            .run_until("it has ended", |sim| !is_listed(sim, inner_tid));
        scenario.sim.advance(Micros::from_millis(50));
        scenario
            .restart(&inner_report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        // With every second seed, the restarted task and the first task exchange no messages before
        // the whole job is checkpointed.
        if seed % 2 == 0 {
            scenario.send_number(inner_tid, root_tid);
            scenario.sim.advance(Micros::from_millis(30));
        }
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(report.tasks.len(), 3);
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        let has_received_after = |sim: &Sim, receiver: Tid, from: Tid| {
            let mut item = sim.procs[sim.proc_of(receiver)].received.iter().rev();
            item.any(|item| *item == Received::Message(from, bytes::Bytes::from_static(b"after")))
        };
        let (inner_proc, root_proc) = (
            scenario.sim.proc_of(inner_tid),
            scenario.sim.proc_of(root_tid),
        );
        scenario.sim.send_message(inner_proc, root_tid, b"after");
        scenario.sim.run_until("the root has heard it", |sim| {
            has_received_after(sim, root_tid, inner_tid)
        });
        scenario.sim.send_message(root_proc, inner_tid, b"after");
        scenario.sim.run_until("it has heard the root", |sim| {
            has_received_after(sim, inner_tid, root_tid)
        });
    }
}

/// Tasks outside a job exchange messages with its tasks after a restart.
#[test]
fn outsiders_reach_restarted_tasks() {
    for seed in seeds(40) {
        let mut scenario = JobScenario::new(seed, 3, 3);
        let (outsider_tid, member_tid) =
            (scenario.sim.procs[scenario.console].tid(), scenario.tids[1]);
        for _ in 0..5 {
            scenario.send_number(outsider_tid, member_tid);
            scenario.send_number(member_tid, outsider_tid);
            scenario.sim.advance(Micros::from_millis(2));
        }
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        for _ in 0..7 {
            scenario.send_number(member_tid, outsider_tid);
            scenario.send_number(outsider_tid, member_tid);
        }
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        let received_numbers = |sim: &Sim, receiver: Tid, from: Tid| {
            let numbers = sim.procs[sim.proc_of(receiver)].received.iter().filter_map(
                move |item| match item {
                    Received::Message(src, body) if *src == from => Some(u32::from_be_bytes(
                        body[..4].try_into().expect("four bytes"),
                    )),
                    _ => None,
                },
            );
            numbers
                .filter(|number| *number >= 1000)
                .collect::<Vec<u32>>()
        };
        // A peer that was notified of a task's exit considers the task dead until the restarted
        // task sends a message.
        let proc = scenario.sim.proc_of(member_tid);
        scenario
            .sim
            .send_message(proc, outsider_tid, &1000u32.to_be_bytes());
        scenario.sim.run_until("it has spoken", |sim| {
            received_numbers(sim, outsider_tid, member_tid) == [1000]
        });
        for number in 1001..1010u32 {
            let proc = scenario.sim.proc_of(member_tid);
            scenario
                .sim
                .send_message(proc, outsider_tid, &number.to_be_bytes());
            scenario.sim.advance(Micros::from_millis(1));
            scenario
                .sim
                .send_message(scenario.console, member_tid, &number.to_be_bytes());
        }
        let expected: Vec<u32> = (1000..1010).collect();
        scenario.sim.run_until("both have heard all", |sim| {
            received_numbers(sim, outsider_tid, member_tid) == expected
                && received_numbers(sim, member_tid, outsider_tid) == expected[1..]
        });
    }
}
