//! Simulates tasks that exchange messages through rings and through a network, and checks at every
//! receive that all earlier messages to the same task were received before, and at the end that
//! nothing is held for ever.
//!
//! The simulated rings show a message at once to a reader that looks at them; the simulated network
//! delays each link on its own. Looks are interleaved with the steps of the other tasks. Tasks
//! migrate (their rings end), are killed (what they have not transmitted is lost), spawn others,
//! use a service, and form jobs that return to their checkpoints independently of each other.
//!
//! `SEMPA_SEEDS` multiplies the number of schedules.

mod jobs;
#[path = "../rng/mod.rs"]
mod rng;
mod set;
mod world;

use sempa_proto::Micros;
use sempa_proto::causal::FOLD_MARKS_MIN;
use world::{Direction, Task, World};

/// Number of steps of a schedule.
const STEP_COUNT: usize = 400;
/// Maximum number of rounds in which everything arrives at the end.
const DRAIN_ROUNDS_MAX: usize = 3000;
/// Number of these rounds after which what is held back grows older.
const ROUNDS_PER_AGE: usize = 2;

/// Events that the tasks of a schedule undergo.
#[derive(Clone, Copy, Debug)]
struct Plan {
    tasks: usize,
    hosts: usize,
    jobs: usize,
    rings: bool,
    /// Average number of steps between two events; 0 for none.
    steps_per_migration: usize,
    steps_per_kill: usize,
    steps_per_spawn: usize,
    steps_per_snapshot: usize,
    steps_per_restart: usize,
    services: bool,
    /// Number of marks of one sender above which a list has one folded mark for them.
    fold_marks_min: usize,
}

impl Plan {
    fn quiet(tasks: usize, hosts: usize, rings: bool) -> Self {
        Self {
            tasks,
            hosts,
            jobs: 1,
            rings,
            steps_per_migration: 0,
            steps_per_kill: 0,
            steps_per_spawn: 0,
            steps_per_snapshot: 0,
            steps_per_restart: 0,
            services: false,
            fold_marks_min: FOLD_MARKS_MIN,
        }
    }
}

impl World {
    fn is_due(&mut self, step_count: usize) -> bool {
        step_count > 0 && self.below(step_count) == 0
    }

    fn take_plan_step(&mut self, plan: Plan) {
        self.step();
        let (task, host) = (self.below(self.tasks.len()), self.below(plan.hosts));
        let job = self.below(plan.jobs);
        if self.is_due(plan.steps_per_migration) && self.is_alive(task) {
            self.migrate(task, host);
        }
        if self.is_due(plan.steps_per_kill) && self.is_alive(task) {
            self.kill(task);
        }
        if self.is_due(plan.steps_per_spawn) && self.is_alive(task) {
            self.spawn(task, host);
        }
        if self.is_due(plan.steps_per_snapshot) {
            self.take_snapshot(job);
        }
        if self.is_due(plan.steps_per_restart) {
            self.restart(job);
        }
    }

    /// Delivers everything that is in transit, and checks that nothing is left.
    fn drain(&mut self) {
        self.is_draining = true;
        for round in 0..DRAIN_ROUNDS_MAX {
            if round % ROUNDS_PER_AGE == 0 {
                self.age_holds();
            }
            self.now = self.now + Micros::from_secs(1);
            for to in 0..self.tasks.len() {
                for from in 0..self.tasks.len() {
                    while from != to && !self.direction(from, to).network.is_empty() {
                        self.receive_from_network(from, to);
                    }
                    if from != to && self.is_alive(to) {
                        self.read_ring(from, to);
                        self.read_receipts(to, from);
                        self.tell_end(to, from);
                    }
                }
                if self.is_alive(to) {
                    self.finish_accept(to);
                    self.wake_links(to);
                    self.check_senders(to);
                    self.refresh_lists(to);
                }
            }
            if self.is_quiet() {
                break;
            }
        }
        self.check_end();
    }

    fn is_quiet(&self) -> bool {
        let is_settled = |task: &Task| {
            task.has_ended
                || (task.order.is_settled()
                    && !task.order.needs_attention()
                    && task.daemon_items.is_empty())
        };
        self.tasks.iter().all(is_settled) && self.directions.values().all(Direction::is_empty)
    }

    fn check_end(&self) {
        for (id, message) in self.messages.iter().enumerate() {
            let receiver = &self.tasks[message.receiver];
            assert!(
                receiver.has_ended || receiver.received.contains(id) || self.lost.contains(id),
                "message {id} of {} to {} never arrived",
                message.sender,
                message.receiver
            );
        }
        let live_tasks = || {
            let tasks = self.tasks.iter().enumerate();
            tasks.filter(|(_, task)| !task.has_ended)
        };
        for (index, task) in live_tasks() {
            let order = &task.order;
            assert!(!order.is_awaiting(), "{index} waits for ever: {order:#?}");
            assert!(task.daemon_items.is_empty(), "{index} keeps items for ever");
        }
        for (index, task) in live_tasks() {
            let order = &task.order;
            assert!(
                order.is_settled(),
                "{index} keeps marks for ever: {order:#?}"
            );
        }
    }
}

fn folded_plan(size: usize) -> Plan {
    Plan {
        steps_per_migration: 80,
        steps_per_kill: 200,
        services: true,
        fold_marks_min: 1,
        ..Plan::quiet(4 + size, 3, size.is_multiple_of(2))
    }
}

fn folded_jobs_plan(size: usize) -> Plan {
    Plan {
        jobs: 2,
        steps_per_snapshot: 40,
        steps_per_restart: 80,
        fold_marks_min: 1,
        ..Plan::quiet(4 + size, 2, true)
    }
}

fn services_plan(size: usize) -> Plan {
    Plan {
        services: true,
        steps_per_spawn: 80,
        steps_per_kill: 200,
        steps_per_migration: 80,
        ..Plan::quiet(4 + size, 2, true)
    }
}

fn shared_services_plan(size: usize) -> Plan {
    Plan {
        jobs: 2,
        services: true,
        steps_per_snapshot: 40,
        steps_per_restart: 80,
        steps_per_spawn: 100,
        steps_per_migration: 60,
        ..Plan::quiet(4 + size, 2, true)
    }
}

/// Runs the first steps of a schedule, and then delivers everything. Returns the largest number of
/// messages that were held back at once.
fn run(seed: u64, plan: Plan, step_count: usize) -> usize {
    let mut world = World::new(seed, plan.tasks, plan.hosts, plan.jobs, plan.fold_marks_min);
    (world.uses_rings, world.uses_services) = (plan.rings, plan.services);
    for _ in 0..step_count {
        world.take_plan_step(plan);
    }
    world.drain();
    world.held_count_max
}

fn plan_of_seed(seed: u64, plan_of: impl Fn(usize) -> Plan) -> Plan {
    plan_of((seed % 4) as usize)
}

/// Runs schedules until one fails, and names its seed.
#[expect(
    clippy::disallowed_methods,
    reason = "the variable only says how many schedules run"
)]
fn run_all(seed_count: u64, plan_of: impl Fn(usize) -> Plan) -> usize {
    let factor = std::env::var("SEMPA_SEEDS")
        .ok()
        .and_then(|text| text.parse::<u64>().ok())
        .unwrap_or(1);
    let mut held_count_max = 0;
    for seed in 0..seed_count * factor {
        let plan = plan_of_seed(seed, &plan_of);
        let outcome = std::panic::catch_unwind(|| run(seed, plan, STEP_COUNT));
        match outcome {
            Ok(held_count) => held_count_max = held_count_max.max(held_count),
            Err(_) => panic!("seed {seed} failed: {plan:?}"),
        }
    }
    held_count_max
}

/// One host: all messages but the first ones go through rings.
#[test]
fn rings_of_one_host_keep_causal_order() {
    run_all(150, |size| Plan::quiet(3 + size, 1, true));
}

/// Several hosts without rings: every message goes through the network.
#[test]
fn network_keeps_causal_order() {
    let held_count = run_all(150, |size| Plan::quiet(3 + size, 3, false));
    assert!(held_count > 0, "no message was ever held back");
}

/// Several hosts; tasks of one host use rings.
#[test]
fn mixed_routes_keep_causal_order() {
    run_all(150, |size| Plan::quiet(4 + size, 2, true));
}

/// As before, while tasks migrate and are killed.
#[test]
fn migrations_and_kills_keep_causal_order() {
    run_all(300, |size| Plan {
        steps_per_migration: 40,
        steps_per_kill: 200,
        ..Plan::quiet(4 + size, 3, true)
    });
}

/// As before, with folded marks for all senders of more than one.
#[test]
fn folded_marks_keep_causal_order() {
    run_all(300, folded_plan);
}

/// Tasks spawn others, and use a service.
#[test]
fn services_and_spawns_keep_causal_order() {
    run_all(150, services_plan);
}

/// All tasks belong to one job, which returns to its checkpoint.
#[test]
fn restarts_of_one_job_keep_causal_order() {
    run_all(300, |size| Plan {
        steps_per_snapshot: 50,
        steps_per_restart: 100,
        ..Plan::quiet(3 + size, 2, true)
    });
}

/// Jobs exchange messages and return to their checkpoints independently of each other.
#[test]
fn restarts_of_several_jobs_keep_causal_order() {
    run_all(200, |size| Plan {
        jobs: 2 + size % 2,
        steps_per_snapshot: 40,
        steps_per_restart: 80,
        ..Plan::quiet(4 + size, 2, true)
    });
}

/// As before, with folded marks for all senders of more than one.
#[test]
fn folded_marks_of_several_jobs_keep_causal_order() {
    run_all(200, folded_jobs_plan);
}

/// Jobs restart, with services, spawns and migrations.
#[test]
fn jobs_that_share_services_keep_causal_order() {
    run_all(150, shared_services_plan);
}

/// The shortest schedules that have failed before the rule or the bookkeeping was corrected that
/// they concern.
#[test]
fn schedules_that_failed_keep_causal_order() {
    let run_steps = |plan_of: fn(usize) -> Plan, seed, step_count| {
        run(seed, plan_of_seed(seed, plan_of), step_count);
    };
    // A restarted task knows a message of its abandoned timeline from others.
    run_steps(shared_services_plan, 216, 354);
    // Messages of an ended task are held back that are later than those of a folded mark.
    run_steps(folded_plan, 125, 178);
    // Tasks remind each other of settled marks of an ended task.
    run_steps(services_plan, 1120, 385);
    // A message waits for one that is sorted behind messages of an earlier incarnation.
    run_steps(shared_services_plan, 957, 270);
    // A mark that others have folded belongs to a later life of its sender.
    run_steps(folded_jobs_plan, 1220, 399);
}
