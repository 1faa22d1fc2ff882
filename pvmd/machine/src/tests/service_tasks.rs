//! Tasks that serve the daemons: taskers, hosters and the tracer.

use super::hosts::add_results;
use super::sim::{Sim, host, seeds};
use super::tasks::{integers, send_to_daemon, spawn_request, spawned_tids};
use crate::HostId;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::sm::{SM_STHOST, SM_STHOSTACK, SM_STTASK, SM_TASKX};
use sempa_proto::table::{TASK_CONNECTED, TASK_TASKER, TASK_TRACER};
use sempa_proto::task::{Claim, Reply, Request, Service, Sink, TracerSettings};
use sempa_proto::{PvmError, Tid};

fn failure_error(reply: Reply) -> PvmError {
    match reply {
        Reply::Failed { error, .. } => error,
        other => panic!("{other:?}"),
    }
}

/// Returns the spawn token in a start order. The started task presents this token to claim its tid.
fn spawn_token_in(start_order: &sempa_proto::Message) -> i32 {
    let mut body = Unpacker::new_xdr(start_order.body.clone());
    let (_tid, _flags, _path) = (body.read_int(), body.read_int(), body.read_string());
    let argv = body.read_strings().expect("arguments");
    assert_eq!(argv, ["/bin/child"]);
    let env = body.read_strings().expect("environment");
    assert_eq!(
        (
            body.read_int(),
            body.read_int(),
            body.read_int(),
            body.remaining()
        ),
        (Ok(0), Ok(1), Ok(1), 0)
    );
    env[0]
        .strip_prefix("PVMEPID=")
        .and_then(|n| n.parse().ok())
        .expect("the first variable")
}

/// Spawns a task through a tasker task that has already received `previous_order_count` orders.
/// Returns the process and the tid.
fn spawn_through_tasker(
    sim: &mut Sim,
    console: usize,
    tasker: usize,
    previous_order_count: usize,
) -> (usize, Tid) {
    let tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("ordered");
    sim.run_until("the order", |s| {
        s.procs[tasker].notifications(SM_STTASK).len() > previous_order_count
    });
    let spawn_token =
        spawn_token_in(&sim.procs[tasker].notifications(SM_STTASK)[previous_order_count]);
    let child_proc = sim.start_with_claim(HostId::MASTER, Claim::Spawned { spawn_token });
    sim.run_until("it is welcome", |s| s.procs[child_proc].welcome.is_some());
    assert_eq!(sim.procs[child_proc].tid(), tid);
    (child_proc, tid)
}

/// Reports the exit of a task to the daemon, as a tasker task does.
fn report_exit(sim: &mut Sim, reporter: usize, tid: Tid) {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_items([tid.raw(), 9, 0, 0, 0, 0]);
    send_to_daemon(sim, reporter, Tid::MY_DAEMON, SM_TASKX, 0, body.finish());
}

/// True if a status request of `console` for the task fails.
fn has_ended(sim: &mut Sim, console: usize, tid: Tid) -> bool {
    let reply = sim.ask(console, Request::TaskStatus { tid });
    matches!(reply, Reply::Failed { .. })
}

/// A task that a tasker task has started ends with its own connection, with its tasker, or with the
/// tasker's report of its exit. A report of another task has no effect.
#[test]
fn tasker_child_ends_with_connection_tasker_or_report() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let tasker = sim.enrol(HostId::MASTER);
        let tasker_tid = sim.procs[tasker].tid();
        assert_eq!(
            sim.ask(tasker, Request::Serve(Service::Tasker)),
            Reply::Serving(true)
        );
        assert_eq!(
            failure_error(sim.ask(console, Request::Serve(Service::Tasker))),
            PvmError::Already
        );
        let mut children = Vec::new();
        for n in 0..3 {
            children.push(spawn_through_tasker(&mut sim, console, tasker, n));
        }
        sim.close_connection(children[0].0);
        sim.run_until("the first has left", |s| {
            s.procs[children[0].0].conn.is_none()
        });
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(
            has_ended(&mut sim, console, children[0].1),
            "closing is its end"
        );
        sim.ask(
            console,
            Request::Signal {
                tid: children[1].1,
                signal: 15,
            },
        );
        sim.run_until("the signal", |s| s.sent_signals == [(children[1].0, 15)]);
        report_exit(&mut sim, console, children[1].1);
        sim.run_until("the word of a stranger is dropped", |s| {
            s.nodes[&HostId::MASTER]
                .log
                .iter()
                .any(|l| l.contains("has not started"))
        });
        assert!(!has_ended(&mut sim, console, children[1].1));
        report_exit(&mut sim, tasker, children[1].1);
        sim.close_connection(children[1].0);
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(has_ended(&mut sim, console, children[1].1));
        let Reply::Tasks(task_list) = sim.ask(
            console,
            Request::Tasks {
                selector: tasker_tid,
            },
        ) else {
            panic!("no list")
        };
        assert_eq!(task_list[0].flags, TASK_CONNECTED | TASK_TASKER);
        assert_eq!(
            sim.ask(tasker, Request::Serve(Service::Tasker)),
            Reply::Serving(false)
        );
        assert!(
            !has_ended(&mut sim, console, children[2].1),
            "a tasker that only stops serving keeps its tasks"
        );
        sim.close_connection(tasker);
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(
            has_ended(&mut sim, console, children[2].1),
            "with their tasker its tasks end"
        );
    }
}

/// A hoster task gets one order for all hosts. If the hoster dies, the daemon starts the remaining
/// hosts itself, except those whose start option requires a hoster. A hoster must run on the
/// master's host.
#[test]
fn hoster_death_leaves_remaining_hosts_to_daemon() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let hoster = sim.enrol(HostId::MASTER);
        assert_eq!(
            sim.ask(hoster, Request::Serve(Service::Hoster)),
            Reply::Serving(true)
        );
        let lines = ["h2", "h3 so=pw", "h4"].map(String::from).to_vec();
        let add_id = sim.request(
            console,
            Request::AddHosts {
                host_file_lines: lines,
            },
        );
        sim.run_until("the order", |s| {
            !s.procs[hoster].notifications(SM_STHOST).is_empty()
        });
        let order = sim.procs[hoster].notifications(SM_STHOST)[0].clone();
        assert_eq!(integers(&order.body)[..2], [3, host(2).tid().raw()]);
        let mut answer = Packer::new(Encoding::Xdr);
        answer
            .pack_int(2)
            .pack_int(host(2).tid().raw())
            .pack_str(b"ddpro<1>")
            .pack_int(host(3).tid().raw())
            .pack_str(b"PvmDupHost");
        send_to_daemon(
            &mut sim,
            hoster,
            Tid::MY_DAEMON,
            SM_STHOSTACK,
            order.wid,
            answer.finish(),
        );
        sim.run_until("it is heard", |s| s.nodes.contains_key(&host(2)));
        sim.close_connection(hoster);
        sim.run_until("the reply", |s| {
            s.procs[console].replies.contains_key(&add_id)
        });
        let results = add_results(sim.procs[console].replies[&add_id].clone());
        assert_eq!(
            results,
            [Ok("h2".into()), Err(PvmError::DupHost), Ok("h4".into())],
            "seed {seed}"
        );
        let other_hoster = sim.enrol(host(2));
        assert_eq!(
            failure_error(sim.ask(other_hoster, Request::Serve(Service::Hoster))),
            PvmError::HosterNotMaster
        );
        let lines = ["h5 so=pw", "h6 so=ms"].map(String::from).to_vec();
        let results = add_results(sim.ask(
            console,
            Request::AddHosts {
                host_file_lines: lines,
            },
        ));
        assert_eq!(
            results,
            [Err(PvmError::NotImpl), Ok("h6".into())],
            "by hand is a way, passwords are none"
        );
    }
}

/// On every host, trace events and output without another destination go to the tracer until the
/// tracer exits. Only one task can be the tracer.
#[test]
fn tracer_is_default_sink_on_every_host() {
    let (mut sim, console) = Sim::cluster(5, 2);
    let tracer = sim.enrol(host(2));
    let tracer_tid = sim.procs[tracer].tid();
    let event_mask = b"@A".to_vec();
    let settings = TracerSettings {
        trace_ctx: 1,
        trace_tag: 2,
        out_ctx: 3,
        out_tag: 4,
        event_mask,
        buffer_bytes: 0,
        trace_option: 1,
    };
    assert_eq!(
        sim.ask(tracer, Request::ServeTracer(settings.clone())),
        Reply::Serving(true)
    );
    assert_eq!(
        failure_error(sim.ask(console, Request::ServeTracer(settings.clone()))),
        PvmError::Already
    );
    sim.ask(
        console,
        Request::AddHosts {
            host_file_lines: vec!["h3".into()],
        },
    );
    for host_number in [1, 2, 3] {
        let task = sim.enrol(host(host_number));
        let welcome = sim.procs[task].welcome.clone().expect("enrolled");
        assert_eq!(
            welcome.trace_sink,
            Sink {
                tid: tracer_tid,
                ctx: 1,
                tag: 2
            }
        );
        assert_eq!(
            welcome.output_sink,
            Sink {
                tid: tracer_tid,
                ctx: 3,
                tag: 4
            }
        );
        assert_eq!(welcome.tracer_settings, Some(settings.clone()));
    }
    let console_sink = Sink {
        tid: sim.procs[console].tid(),
        ctx: 7,
        tag: 8,
    };
    let mut request = spawn_request("child", 1);
    (request.output_sink, request.trace_sink) = (console_sink, console_sink);
    let child = spawned_tids(sim.ask(console, Request::Spawn(request)))[0].expect("started");
    sim.run_until("it runs", |s| {
        s.procs
            .iter()
            .any(|p| p.welcome.as_ref().is_some_and(|w| w.tid == child))
    });
    let child = sim.proc_of(child);
    let welcome = sim.procs[child].welcome.clone().expect("enrolled");
    assert_eq!(
        (
            welcome.output_sink,
            welcome.trace_sink,
            welcome.tracer_settings
        ),
        (console_sink, console_sink, None)
    );
    let Reply::Tasks(tasks) = sim.ask(
        console,
        Request::Tasks {
            selector: tracer_tid,
        },
    ) else {
        panic!("no list")
    };
    assert_eq!(tasks[0].flags, TASK_CONNECTED | TASK_TRACER);
    sim.close_connection(tracer);
    sim.advance(sempa_proto::Micros::from_millis(50));
    let late_task = sim.enrol(host(3));
    assert_eq!(
        sim.procs[late_task].welcome.as_ref().map(|w| w.trace_sink),
        Some(Sink::default())
    );
}
