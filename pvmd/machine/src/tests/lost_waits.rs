//! Requests that wait while a host, its tasker or a task is lost: each gets a reply.

use super::sim::{Sim, host, seeds};
use super::tasks::{integers, spawn_request, spawned_tids};
use sempa_proto::checkpoint::RemovalSelection;
use sempa_proto::group::{ALL_MEMBERS, GroupRequest};
use sempa_proto::table::AddedHost;
use sempa_proto::task::{
    MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, SPAWN_HOST, Sink, SpawnRequest,
};
use sempa_proto::{Micros, RequestId, Tid};

/// What is lost while a request waits.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Host,
    Tasker,
    Task,
}

const LOSSES: [Loss; 3] = [Loss::Host, Loss::Tasker, Loss::Task];

/// A virtual machine with three hosts, and a task on each of the hosts 2 and 3.
struct Scene {
    sim: Sim,
    console: usize,
    /// The task of host 2.
    near: Tid,
    /// The task of host 3, which is lost.
    far: Tid,
    /// A context of that task.
    far_context: i32,
    /// The checkpoint of a job that ran on host 3.
    checkpoint: String,
}

fn spawn_on(sim: &mut Sim, console: usize, host_name: &str, output_sink: Sink) -> Tid {
    let request = SpawnRequest {
        where_arg: host_name.into(),
        flags: SPAWN_HOST,
        output_sink,
        ..spawn_request("child", 1)
    };
    let tid = spawned_tids(sim.ask(console, Request::Spawn(request)))[0].expect("started");
    sim.run_until("the task is there", |s| {
        s.procs[s.proc_of(tid)].welcome.is_some()
    });
    tid
}

impl Scene {
    fn new(seed: u64) -> Self {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let near = spawn_on(&mut sim, console, "h2", Sink::default());
        let ended_job = spawn_on(&mut sim, console, "h3", Sink::default());
        let end_with_checkpoint = checkpoint_request(ended_job, true);
        let reply = sim.ask(console, end_with_checkpoint);
        let Reply::Checkpointed(Ok(report)) = reply else {
            panic!("{reply:?} (seed {seed})")
        };
        let far = spawn_on(&mut sim, console, "h3", Sink::default());
        let far_proc = sim.proc_of(far);
        let Reply::Context(far_context) = sim.ask(far_proc, Request::NewContext) else {
            panic!("no context (seed {seed})")
        };
        let mut scene = Self {
            sim,
            console,
            near,
            far,
            far_context,
            checkpoint: report.name,
        };
        for tid in [near, far] {
            let join = Request::Group(GroupRequest::Join {
                group: b"workers".to_vec(),
            });
            let proc = scene.sim.proc_of(tid);
            scene.sim.ask(proc, join);
        }
        scene
    }

    /// Loses host 3, its tasker or its task.
    fn lose(&mut self, loss: Loss) {
        match loss {
            Loss::Host => self.sim.kill_host(host(3)),
            Loss::Tasker => self.sim.kill_tasker(host(3)),
            Loss::Task => {
                let proc = self.sim.proc_of(self.far);
                self.sim.exit_proc(proc, 9);
            }
        }
    }
}

fn checkpoint_request(job: Tid, end_job: bool) -> Request {
    Request::Checkpoint {
        job,
        schedule: None,
        end_job,
        wait_for_end: true,
    }
}

/// Number of requests that [`waiting_requests`] returns.
const REQUEST_COUNT: usize = 28;

/// Returns all requests whose replies depend on host 3 or its task. The requester is a member of
/// the group, if it is the task of host 2.
fn waiting_requests(scene: &Scene) -> Vec<Request> {
    let (near, far) = (scene.near, scene.far);
    let spawn = |where_arg: &str, flags: i32, count: u32| {
        Request::Spawn(SpawnRequest {
            where_arg: where_arg.into(),
            flags,
            ..spawn_request("child", count)
        })
    };
    let migrate = |tid: Tid, target: &str| Request::Migrate {
        tid,
        target: target.into(),
        cause: None,
        wait_for_end: true,
    };
    let restart = |host_names: Vec<String>| Request::Restart {
        checkpoint: scene.checkpoint.clone(),
        host_names,
        wait_for_end: true,
        force: false,
    };
    let tasks = |selector| Request::Tasks { selector };
    let group = b"workers".to_vec();
    let barrier = |required_members| {
        Request::Group(GroupRequest::Barrier {
            group: group.clone(),
            required_members,
        })
    };
    vec![
        spawn("h3", SPAWN_HOST, 2),
        spawn("", 0, 6),
        tasks(Tid::NONE),
        tasks(host(3).tid()),
        tasks(far),
        Request::AddHosts {
            host_file_lines: vec!["h4".into()],
        },
        Request::DelHosts {
            host_names: vec!["h3".into()],
        },
        Request::HostStatus { name: "h3".into() },
        Request::TaskStatus { tid: far },
        Request::Signal {
            tid: far,
            signal: 10,
        },
        Request::Suspend {
            tid: far,
            suspend: true,
            cause: None,
        },
        Request::HostSync {
            host: host(3).tid(),
        },
        Request::Mailbox(MailboxRequest::List {
            pattern: String::new(),
        }),
        barrier(2),
        barrier(ALL_MEMBERS),
        Request::Group(GroupRequest::Freeze {
            group: group.clone(),
            required_members: ALL_MEMBERS,
        }),
        migrate(far, "h2"),
        migrate(near, "h3"),
        Request::FindMigrationTargets {
            tid: far,
            target: None,
        },
        Request::FindMigrationTargets {
            tid: near,
            target: Some("h3".into()),
        },
        checkpoint_request(far, false),
        checkpoint_request(far, true),
        checkpoint_request(near, false),
        Request::ListCheckpoints,
        restart(vec!["h3".into()]),
        Request::RemoveCheckpoints {
            selection: RemovalSelection::Checkpoints(vec![scene.checkpoint.clone()]),
            include_foreign: false,
        },
        Request::FreeContext {
            ctx: scene.far_context,
        },
        Request::Reset { kill_tasks: false },
    ]
}

/// Asserts that a reply that reports a failure also reports the reason.
fn assert_has_reason(reply: &Reply, wait: &str) {
    match reply {
        Reply::Failed { reason, .. } => assert!(!reason.is_empty(), "{wait}: {reply:?}"),
        Reply::HostsAdded(hosts) => {
            let has_reason = |host: &AddedHost| host.result.is_ok() || !host.reason.is_empty();
            assert!(hosts.iter().all(has_reason), "{wait}: {reply:?}");
        }
        // The types of the other failures are reasons.
        _ => {}
    }
}

/// Every request gets a reply, with the reason of a failure, whenever host 3, its tasker or its
/// task is lost, for a requester on the master's host and for one on another host.
#[test]
fn every_wait_ends_when_what_it_concerns_is_lost() {
    for seed in seeds(4) {
        for (request_index, loss) in
            (0..REQUEST_COUNT).flat_map(|index| LOSSES.map(|loss| (index, loss)))
        {
            for is_near in [false, true] {
                let mut scene = Scene::new(seed);
                let requester = if is_near {
                    scene.sim.proc_of(scene.near)
                } else {
                    scene.console
                };
                let mut requests = waiting_requests(&scene);
                assert_eq!(requests.len(), REQUEST_COUNT);
                let request = requests.swap_remove(request_index);
                let wait =
                    format!("the reply to {request:?} after the loss of {loss:?} (seed {seed})");
                let requester_tid = scene.sim.procs[requester].tid();
                let id: RequestId = scene.sim.request(requester, request);
                let delay = Micros(scene.sim.rng.below(40_000));
                scene.sim.advance(delay);
                scene.lose(loss);
                // A requester that has migrated is another process with the same tid.
                let reply = |s: &Sim| {
                    let requesters = s
                        .procs
                        .iter()
                        .filter(|p| p.welcome.is_some() && p.tid() == requester_tid);
                    { requesters }.find_map(|p| p.replies.get(&id).cloned())
                };
                // A requester that has migrated to the lost host is lost with it.
                let is_gone = |s: &Sim| {
                    let mut live_nodes = s.nodes.values().filter(|node| node.is_alive);
                    !live_nodes.any(|node| node.machine.is_alive(requester_tid))
                };
                scene
                    .sim
                    .run_until(&wait, |s| reply(s).is_some() || is_gone(s));
                if let Some(reply) = reply(&scene.sim) {
                    assert_has_reason(&reply, &wait);
                }
            }
        }
    }
}

/// A task that asks for the notification of a child's exit when the child has already ended gets
/// the end of its output first.
#[test]
fn late_notification_follows_the_end_of_output() {
    for seed in seeds(30) {
        let mut scene = Scene::new(seed);
        let (sim, console) = (&mut scene.sim, scene.console);
        let child = spawn_with_output(sim, console);
        let child_proc = sim.proc_of(child);
        sim.exit_proc(child_proc, 0);
        let delay = Micros(sim.rng.below(3_000));
        sim.advance(delay);
        request_exit_notice(sim, console, child);
        sim.run_until("the exit is known", |s| {
            !s.procs[console].notifications(EXIT_TAG).is_empty()
        });
        assert_eq!(end_count(sim, console), 1, "seed {seed}");
    }
}

/// An exit notice that is lost with a session of two slaves arrives when they are connected again.
#[test]
fn lost_exit_notice_is_repeated_with_the_next_session() {
    for seed in seeds(20) {
        let mut scene = Scene::new(seed);
        let (sim, far) = (&mut scene.sim, scene.far);
        let watcher = sim.proc_of(scene.near);
        request_exit_notice(sim, watcher, far);
        sim.advance(Micros::from_millis(50));
        let far_proc = sim.proc_of(far);
        sim.exit_proc(far_proc, 0);
        let delay = Micros(sim.rng.below(4_000));
        sim.advance(delay);
        sim.separate_hosts(host(2), host(3), Micros::from_millis(300));
        sim.run_until("the exit is known", |s| {
            !s.procs[watcher].notifications(EXIT_TAG).is_empty()
        });
        assert!(sim.nodes[&host(3)].is_alive, "seed {seed}");
    }
}

const OUTPUT_TAG: i32 = 44;
const EXIT_TAG: i32 = 45;

/// Spawns a child on host 3 whose output goes to the console.
fn spawn_with_output(sim: &mut Sim, console: usize) -> Tid {
    let output_sink = Sink {
        tid: sim.procs[console].tid(),
        ctx: 0,
        tag: OUTPUT_TAG,
    };
    spawn_on(sim, console, "h3", output_sink)
}

fn request_exit_notice(sim: &mut Sim, console: usize, child: Tid) {
    let notify = NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![child]),
        ctx: 0,
        tag: EXIT_TAG,
        is_cancellation: false,
    };
    sim.ask(console, Request::Notify(notify));
}

/// Returns how often the end of a child's output has arrived.
fn end_count(sim: &Sim, console: usize) -> usize {
    let marks = sim.procs[console].notifications(OUTPUT_TAG);
    marks.iter().filter(|m| integers(&m.body)[1] == 0).count()
}

/// The collector of a task's output gets the end of the output before the notification of the
/// task's exit. Only if the host is lost the end is missing, and the notification comes alone.
#[test]
fn end_of_output_is_missing_only_with_lost_host() {
    for (seed, loss) in seeds(10).flat_map(|seed| LOSSES.map(|loss| (seed, loss))) {
        let mut scene = Scene::new(seed);
        let (sim, console) = (&mut scene.sim, scene.console);
        scene.far = spawn_with_output(sim, console);
        request_exit_notice(sim, console, scene.far);
        scene.lose(loss);
        scene.sim.run_until("the exit is known", |s| {
            !s.procs[console].notifications(EXIT_TAG).is_empty()
        });
        let is_host_lost = matches!(loss, Loss::Host);
        assert_eq!(
            end_count(&scene.sim, console),
            usize::from(!is_host_lost),
            "seed {seed}, {loss:?}"
        );
    }
}
