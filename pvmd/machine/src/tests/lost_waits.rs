//! Requests that wait while a host, its tasker or a task is lost: each gets a reply.

use super::sim::{Sim, host, seeds};
use super::tasks::{integers, spawn_request, spawned_tids};
use sempa_proto::group::{ALL_MEMBERS, GroupRequest};
use sempa_proto::task::{
    MailboxRequest, NotifyRequest, NotifySubjects, Request, SPAWN_HOST, Sink, SpawnRequest,
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
        let far = spawn_on(&mut sim, console, "h3", Sink::default());
        let mut scene = Self {
            sim,
            console,
            near,
            far,
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

/// Returns all requests whose replies depend on host 3 or its task. The requester is a member of
/// the group, if it is the task of host 2.
fn waiting_requests(near: Tid, far: Tid) -> Vec<Request> {
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
    let checkpoint = |job: Tid, end_job: bool| Request::Checkpoint {
        job,
        schedule: None,
        end_job,
        wait_for_end: true,
    };
    let group = b"workers".to_vec();
    vec![
        spawn("h3", SPAWN_HOST, 2),
        spawn("", 0, 6),
        Request::Tasks {
            selector: Tid::NONE,
        },
        Request::Tasks {
            selector: host(3).tid(),
        },
        Request::Tasks { selector: far },
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
        Request::Group(GroupRequest::Barrier {
            group: group.clone(),
            required_members: 2,
        }),
        Request::Group(GroupRequest::Barrier {
            group: group.clone(),
            required_members: ALL_MEMBERS,
        }),
        Request::Group(GroupRequest::Freeze {
            group,
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
        checkpoint(far, false),
        checkpoint(far, true),
        checkpoint(near, false),
        Request::ListCheckpoints,
        Request::Reset { kill_tasks: false },
    ]
}

/// Every request gets a reply, whenever host 3, its tasker or its task is lost, for a requester on
/// the master's host and for one on another host.
#[test]
fn every_wait_ends_when_what_it_concerns_is_lost() {
    let request_count = waiting_requests(Tid::NONE, Tid::NONE).len();
    for seed in seeds(4) {
        for (request_index, loss) in
            (0..request_count).flat_map(|index| LOSSES.map(|loss| (index, loss)))
        {
            for is_near in [false, true] {
                let mut scene = Scene::new(seed);
                let requester = if is_near {
                    scene.sim.proc_of(scene.near)
                } else {
                    scene.console
                };
                let request = waiting_requests(scene.near, scene.far).swap_remove(request_index);
                let wait = format!("the reply to {request:?} after the loss of {loss:?}");
                let id: RequestId = scene.sim.request(requester, request);
                let delay = Micros(scene.sim.rng.below(40_000));
                scene.sim.advance(delay);
                scene.lose(loss);
                scene.sim.run_until(&wait, |s| {
                    let p = &s.procs[requester];
                    // A task that was killed at the source is lost with its target.
                    let is_dead = p.exited || (p.is_frozen() && s.injection.source_was_killed());
                    s.procs.iter().any(|p| p.replies.contains_key(&id)) || is_dead
                });
            }
        }
    }
}

/// The collector of a task's output gets the end of the output before the notification of the
/// task's exit. Only if the host is lost the end is missing, and the notification comes alone.
#[test]
fn end_of_output_is_missing_only_with_lost_host() {
    const OUTPUT_TAG: i32 = 44;
    const EXIT_TAG: i32 = 45;
    for (seed, loss) in seeds(10).flat_map(|seed| LOSSES.map(|loss| (seed, loss))) {
        let mut scene = Scene::new(seed);
        let output_sink = Sink {
            tid: scene.sim.procs[scene.console].tid(),
            ctx: 0,
            tag: OUTPUT_TAG,
        };
        let (sim, console) = (&mut scene.sim, scene.console);
        scene.far = spawn_on(sim, console, "h3", output_sink);
        let notify = NotifyRequest {
            subjects: NotifySubjects::TaskExit(vec![scene.far]),
            ctx: 0,
            tag: EXIT_TAG,
            is_cancellation: false,
        };
        scene.sim.ask(console, Request::Notify(notify));
        scene.lose(loss);
        let end_count = |s: &Sim| {
            let marks = s.procs[console].notifications(OUTPUT_TAG);
            marks.iter().filter(|m| integers(&m.body)[1] == 0).count()
        };
        scene.sim.run_until("the exit is known", |s| {
            !s.procs[console].notifications(EXIT_TAG).is_empty()
        });
        let is_host_lost = matches!(loss, Loss::Host);
        assert_eq!(
            end_count(&scene.sim),
            usize::from(!is_host_lost),
            "seed {seed}, {loss:?}"
        );
    }
}
