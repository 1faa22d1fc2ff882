//! Tasks that work for daemons: taskers, hosters and the tracer.

use super::hosts::add_results;
use super::sim::{Sim, host, seeds};
use super::tasks::{integers, send_to_daemon, spawn_request, spawned_tids};
use crate::HostId;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::sm::{SM_STHOST, SM_STHOSTACK, SM_STTASK, SM_TASKX};
use sempa_proto::table::{TASK_CONNECTED, TASK_TASKER, TASK_TRACER};
use sempa_proto::task::{Claim, Reply, Request, Service, Sink, TracerSettings};
use sempa_proto::{PvmError, Tid};

fn expect_failure(reply: Reply) -> PvmError {
    match reply {
        Reply::Failed { error, .. } => error,
        other => panic!("{other:?}"),
    }
}

/// Returns the spawn token in a start order. The started task claims its tid by this token.
fn spawn_token_in(start_order: &sempa_proto::Message) -> i32 {
    let mut body = Unpacker::xdr(start_order.body.clone());
    let (_tid, _flags, _path) = (body.int(), body.int(), body.string());
    let argv = body.strings().expect("arguments");
    assert_eq!(argv, ["/bin/child"]);
    let env = body.strings().expect("environment");
    assert_eq!(
        (body.int(), body.int(), body.int(), body.remaining()),
        (Ok(0), Ok(1), Ok(1), 0)
    );
    env[0]
        .strip_prefix("PVMEPID=")
        .and_then(|n| n.parse().ok())
        .expect("the first variable")
}

/// Spawns a task through the tasker task, which has got `earlier_orders` orders before.
fn spawn_through_tasker(
    sim: &mut Sim,
    console: usize,
    tasker: usize,
    earlier_orders: usize,
) -> (usize, Tid) {
    let tid = spawned_tids(sim.ask(console, Request::Spawn(spawn_request("child", 1))))[0]
        .expect("ordered");
    sim.run_until("the order", |s| {
        s.procs[tasker].notifications(SM_STTASK).len() > earlier_orders
    });
    let epid = spawn_token_in(&sim.procs[tasker].notifications(SM_STTASK)[earlier_orders]);
    let child = sim.claim(HostId::MASTER, Claim::Spawned { spawn_token: epid });
    sim.run_until("it is welcome", |s| s.procs[child].welcome.is_some());
    assert_eq!(sim.procs[child].tid(), tid);
    (child, tid)
}

/// A task that a tasker task has started ends with its connection, with its tasker, or when the
/// tasker reports its exit.
#[test]
fn tasker_child_ends_with_connection_tasker_or_report() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 1);
        let tasker = sim.enrol(HostId::MASTER);
        let me = sim.procs[tasker].tid();
        assert_eq!(
            sim.ask(tasker, Request::Serve(Service::Tasker)),
            Reply::Serving(true)
        );
        assert_eq!(
            expect_failure(sim.ask(console, Request::Serve(Service::Tasker))),
            PvmError::Already
        );
        let mut children = Vec::new();
        for n in 0..3 {
            children.push(spawn_through_tasker(&mut sim, console, tasker, n));
        }
        let gone = |sim: &mut Sim, tid| {
            matches!(
                sim.ask(console, Request::TaskStatus { tid }),
                Reply::Failed { .. }
            )
        };
        sim.close(children[0].0);
        sim.run_until("the first has left", |s| {
            s.procs[children[0].0].conn.is_none()
        });
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(gone(&mut sim, children[0].1), "closing is its end");
        sim.ask(
            console,
            Request::Signal {
                tid: children[1].1,
                signal: 15,
            },
        );
        sim.run_until("the signal", |s| s.signalled == [(children[1].0, 15)]);
        let end = |tid: Tid| {
            let mut body = Packer::new(Encoding::Xdr);
            body.items([tid.raw(), 9, 0, 0, 0, 0]);
            body.finish()
        };
        send_to_daemon(
            &mut sim,
            console,
            Tid::MY_DAEMON,
            SM_TASKX,
            0,
            end(children[1].1),
        );
        sim.run_until("the word of a stranger is dropped", |s| {
            s.nodes[&HostId::MASTER]
                .log
                .iter()
                .any(|l| l.contains("has not started"))
        });
        assert!(!gone(&mut sim, children[1].1));
        send_to_daemon(
            &mut sim,
            tasker,
            Tid::MY_DAEMON,
            SM_TASKX,
            0,
            end(children[1].1),
        );
        sim.close(children[1].0);
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(gone(&mut sim, children[1].1));
        let Reply::Tasks(list) = sim.ask(console, Request::Tasks { selector: me }) else {
            panic!("no list")
        };
        assert_eq!(list[0].flags, TASK_CONNECTED | TASK_TASKER);
        assert_eq!(
            sim.ask(tasker, Request::Serve(Service::Tasker)),
            Reply::Serving(false)
        );
        assert!(
            !gone(&mut sim, children[2].1),
            "a tasker that only stops serving keeps its tasks"
        );
        sim.close(tasker);
        sim.advance(sempa_proto::Micros::from_millis(50));
        assert!(
            gone(&mut sim, children[2].1),
            "with their tasker its tasks end"
        );
    }
}

/// A hoster gets one order for all hosts. After its death the daemon starts the remaining hosts.
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
        let id = sim.request(console, Request::AddHosts { lines });
        sim.run_until("the order", |s| {
            !s.procs[hoster].notifications(SM_STHOST).is_empty()
        });
        let order = sim.procs[hoster].notifications(SM_STHOST)[0].clone();
        assert_eq!(integers(&order.body)[..2], [3, host(2).tid().raw()]);
        let mut answer = Packer::new(Encoding::Xdr);
        answer
            .int(2)
            .int(host(2).tid().raw())
            .str(b"ddpro<1>")
            .int(host(3).tid().raw())
            .str(b"PvmDupHost");
        send_to_daemon(
            &mut sim,
            hoster,
            Tid::MY_DAEMON,
            SM_STHOSTACK,
            order.wid,
            answer.finish(),
        );
        sim.run_until("it is heard", |s| s.nodes.contains_key(&host(2)));
        sim.close(hoster);
        sim.run_until("the reply", |s| s.procs[console].replies.contains_key(&id));
        let added = add_results(sim.procs[console].replies[&id].clone());
        assert_eq!(
            added,
            [Ok("h2".into()), Err(PvmError::DupHost), Ok("h4".into())],
            "seed {seed}"
        );
        let elsewhere = sim.enrol(host(2));
        assert_eq!(
            expect_failure(sim.ask(elsewhere, Request::Serve(Service::Hoster))),
            PvmError::HosterNotMaster
        );
        let lines = ["h5 so=pw", "h6 so=ms"].map(String::from).to_vec();
        let added = add_results(sim.ask(console, Request::AddHosts { lines }));
        assert_eq!(
            added,
            [Err(PvmError::NotImpl), Ok("h6".into())],
            "by hand is a way, passwords are none"
        );
    }
}

/// On every host, trace and output without another destination go to the tracer until it exits.
#[test]
fn tracer_is_default_sink_on_every_host() {
    let (mut sim, console) = Sim::cluster(5, 2);
    let tracer = sim.enrol(host(2));
    let me = sim.procs[tracer].tid();
    let mask = b"@A".to_vec();
    let settings = TracerSettings {
        trace_ctx: 1,
        trace_tag: 2,
        out_ctx: 3,
        out_tag: 4,
        event_mask: mask,
        buffer_bytes: 0,
        options: 1,
    };
    assert_eq!(
        sim.ask(tracer, Request::ServeTracer(settings.clone())),
        Reply::Serving(true)
    );
    assert_eq!(
        expect_failure(sim.ask(console, Request::ServeTracer(settings.clone()))),
        PvmError::Already
    );
    sim.ask(
        console,
        Request::AddHosts {
            lines: vec!["h3".into()],
        },
    );
    for on in [1, 2, 3] {
        let task = sim.enrol(host(on));
        let welcome = sim.procs[task].welcome.clone().expect("enrolled");
        assert_eq!(
            welcome.trace,
            Sink {
                tid: me,
                ctx: 1,
                tag: 2
            }
        );
        assert_eq!(
            welcome.output,
            Sink {
                tid: me,
                ctx: 3,
                tag: 4
            }
        );
        assert_eq!(welcome.tracer, Some(settings.clone()));
    }
    let own = Sink {
        tid: sim.procs[console].tid(),
        ctx: 7,
        tag: 8,
    };
    let mut request = spawn_request("child", 1);
    (request.output, request.trace) = (own, own);
    let child = spawned_tids(sim.ask(console, Request::Spawn(request)))[0].expect("started");
    sim.run_until("it runs", |s| {
        s.procs
            .iter()
            .any(|p| p.welcome.as_ref().is_some_and(|w| w.tid == child))
    });
    let child = sim.proc_of(child);
    let welcome = sim.procs[child].welcome.clone().expect("enrolled");
    assert_eq!(
        (welcome.output, welcome.trace, welcome.tracer),
        (own, own, None)
    );
    let Reply::Tasks(list) = sim.ask(console, Request::Tasks { selector: me }) else {
        panic!("no list")
    };
    assert_eq!(list[0].flags, TASK_CONNECTED | TASK_TRACER);
    sim.close(tracer);
    sim.advance(sempa_proto::Micros::from_millis(50));
    let late = sim.enrol(host(3));
    assert_eq!(
        sim.procs[late].welcome.as_ref().map(|w| w.trace),
        Some(Sink::default())
    );
}
