//! Tests of requests that a resource manager serves, and of the death of the resource manager.

use super::fake::FakeDaemon;
use super::{message, recv_next, wait_until};
use crate::runtime::Runtime;
use crate::vm::Vm;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::message::Message;
use sempa_proto::sm::{
    PlacementLease, SM_CONFIG, SM_NOTIFY, SM_PLACEMENT_LEASE, SM_SPAWN, SM_SPAWN_WAITS,
    pack_placement_lease, pack_spawn_waits, pack_tids, unpack_spawn,
};
use sempa_proto::table::HostTable;
use sempa_proto::task::{
    LeasedSpawn, NotifyRequest, NotifySubjects, Reply, Request, RmInfo, RmServices, SpawnRequest,
    ToDaemon, ToTask,
};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::thread;

const SERVES_ALL: RmServices = RmServices {
    spawn: true,
    other_requests: true,
    task_exits: true,
};

fn worker_request() -> SpawnRequest {
    SpawnRequest {
        file: "worker".into(),
        count: 2,
        ..SpawnRequest::default()
    }
}

/// Enrolls a resource manager, and a task to which the daemon reports this resource manager.
fn enroll_rm_and_task(fake: &FakeDaemon, serves: RmServices) -> (Runtime, Runtime) {
    let rm = fake.enroll();
    fake.state().rm = Some(RmInfo {
        tid: rm.tid(),
        services: serves,
    });
    let task = fake.enroll();
    (rm, task)
}

fn answer(rm: &Runtime, asked: &Message, wid: i32, body: bytes::Bytes) {
    let mut reply = message(asked.src, asked.tag, body);
    reply.wid = wid;
    rm.send(reply).expect("answered");
}

/// Reports to `task` that its request has waited since `since`, and returns when the report has
/// arrived.
fn report_waiting(rm: &Runtime, task: &Runtime, asked: &Message, since: Option<Micros>) {
    let mut report = message(asked.src, SM_SPAWN_WAITS, pack_spawn_waits(since));
    report.wid = asked.wid;
    rm.send(report).expect("sent");
    wait_until("the word", || {
        (task
            .with_core(|core| core.rm_calls.waiting_since(asked.wid))
            .flatten()
            == since)
            .then_some(())
    });
}

/// A spawn goes to the resource manager, and its answer is returned.
#[test]
fn spawn_is_answered_by_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        },
    );
    let results = vec![Ok(Tid::from_raw(0x40009)), Err(PvmError::NoFile)];
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        let asked = recv_next(&rm);
        assert_eq!(
            (asked.tag, unpack_spawn(asked.body.clone())),
            (SM_SPAWN, Ok((worker_request(), None)))
        );
        answer(&rm, &asked, asked.wid, pack_tids(&results));
        assert_eq!(spawning.join().expect("ended"), Ok(results.clone()));
    });
    // Requests that the resource manager does not serve go to the daemon.
    fake.set_responder(|_, what| {
        (*what == Request::Config).then(|| Reply::Hosts(HostTable::default()))
    });
    assert_eq!(task.config(), Ok(HostTable::default()));
}

/// An answer with a wrong wait id is accepted, as in PVM.
#[test]
fn answer_with_wrong_wait_id_is_accepted() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    thread::scope(|scope| {
        let asking = scope.spawn(|| task.config());
        let asked = recv_next(&rm);
        assert_eq!(asked.tag, SM_CONFIG);
        let mut out = Packer::new(Encoding::Xdr);
        out.int(1)
            .int(1)
            .int(0x40000)
            .str(b"one")
            .str(b"LINUX64")
            .int(1000)
            .int(7);
        answer(&rm, &asked, 0, out.finish());
        let table = asking.join().expect("ended").expect("a table");
        assert_eq!(
            (
                table.hosts.len(),
                table.hosts[0].name.as_str(),
                table.data_format_count()
            ),
            (1, "one", 1)
        );
    });
}

/// Several concurrent calls each receive their own answer, in any order of the answers.
#[test]
fn concurrent_calls_get_their_own_answers() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=8)
            .map(|n| {
                let task = &task;
                scope.spawn(move || {
                    task.spawn(SpawnRequest {
                        count: n,
                        ..worker_request()
                    })
                    .expect("answered")
                    .len()
                })
            })
            .collect();
        let mut asked: Vec<Message> = (0..8).map(|_| recv_next(&rm)).collect();
        asked.reverse();
        for question in &asked {
            let count = unpack_spawn(question.body.clone())
                .expect("a spawn")
                .0
                .count;
            answer(
                &rm,
                question,
                question.wid,
                pack_tids(&vec![Err(PvmError::NoHost); count as usize]),
            );
        }
        let lens: Vec<usize> = threads
            .into_iter()
            .map(|t| t.join().expect("ended"))
            .collect();
        assert_eq!(lens, [1, 2, 3, 4, 5, 6, 7, 8]);
    });
}

/// A thread that receives all messages does not receive a resource manager's answers.
#[test]
fn answers_do_not_reach_inbox() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        let greedy = scope.spawn(|| recv_next(&task));
        let asked = recv_next(&rm);
        answer(
            &rm,
            &asked,
            asked.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
        rm.send(message(task.tid(), 5, "for the other"))
            .expect("sent");
        assert_eq!(greedy.join().expect("received").tag, 5);
    });
}

/// When the resource manager dies, an unanswered call is sent to the daemon.
#[test]
fn rm_death_redirects_call_to_daemon() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    fake.set_responder(|_, what| {
        matches!(what, Request::Spawn(_)).then(|| Reply::Spawned(vec![Err(PvmError::NoHost); 2]))
    });
    let generation = task.rm_generation();
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        recv_next(&rm);
        assert!(!spawning.is_finished());
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!((task.rm(), task.rm_generation()), (None, generation + 1));
    // Later requests go to the daemon immediately.
    assert_eq!(
        task.spawn(worker_request()),
        Ok(vec![Err(PvmError::NoHost); 2])
    );
}

/// A spawn that waits for free slots is sent to the next resource manager, with its waiting time.
#[test]
fn waiting_spawn_continues_at_next_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    let other = fake.enroll();
    fake.set_responder(|_, what| {
        matches!(what, Request::Spawn(_)).then(|| Reply::Spawned(vec![Err(PvmError::HostFail); 2]))
    });
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        let asked = recv_next(&rm);
        report_waiting(&rm, &task, &asked, Some(Micros(5_000_000)));
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        wait_until("the death", || task.rm().is_none().then_some(()));
        fake.send_control(
            task.tid(),
            ToTask::RmChanged {
                rm: Some(RmInfo {
                    tid: other.tid(),
                    services: SERVES_ALL,
                }),
            },
        );
        let again = recv_next(&other);
        assert_eq!(
            unpack_spawn(again.body.clone()),
            Ok((worker_request(), Some(Micros(5_000_000))))
        );
        answer(
            &other,
            &again,
            again.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!(task.check_inbox(&mut |inbox| inbox.get(0).cloned()), None);
}

/// A spawn that stopped waiting before the resource manager died goes to the daemon.
#[test]
fn spawn_not_waiting_at_rm_death_goes_to_daemon() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    fake.set_responder(|_, what| {
        matches!(what, Request::Spawn(_)).then(|| Reply::Spawned(vec![Err(PvmError::NoHost); 2]))
    });
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        let asked = recv_next(&rm);
        for since in [Some(Micros(7)), None] {
            report_waiting(&rm, &task, &asked, since);
        }
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
}

/// Replacing the resource manager does not repeat an open call.
#[test]
fn rm_replacement_does_not_repeat_call() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    let other = fake.enroll();
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(worker_request()));
        let asked = recv_next(&rm);
        let changed = RmInfo {
            tid: other.tid(),
            services: SERVES_ALL,
        };
        fake.send_control(task.tid(), ToTask::RmChanged { rm: Some(changed) });
        wait_until("the news", || (task.rm() == Some(changed)).then_some(()));
        answer(
            &rm,
            &asked,
            asked.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!(other.check_inbox(&mut |inbox| inbox.get(0).cloned()), None);
}

fn single_request() -> SpawnRequest {
    SpawnRequest {
        count: 1,
        ..worker_request()
    }
}

/// Spawns one task; the resource manager answers and leases hosts for further spawns.
fn spawn_with_lease(rm: &Runtime, task: &Runtime, child: Tid, hosts: &[u16], span: Micros) -> i32 {
    spawn_several_with_lease(rm, task, &[child], (hosts, span))
}

/// As [`spawn_with_lease`], for a request for several tasks.
fn spawn_several_with_lease(
    rm: &Runtime,
    task: &Runtime,
    children: &[Tid],
    (hosts, span): (&[u16], Micros),
) -> i32 {
    let hosts: Vec<HostId> = hosts
        .iter()
        .map(|host| HostId::new(*host).expect("a host"))
        .collect();
    let started: Vec<_> = children.iter().copied().map(Ok).collect();
    thread::scope(|scope| {
        let spawning = scope.spawn(|| {
            task.spawn(SpawnRequest {
                count: children.len() as u32,
                ..worker_request()
            })
        });
        let asked = recv_next(rm);
        answer(rm, &asked, asked.wid, pack_tids(&started));
        assert_eq!(spawning.join().expect("ended"), Ok(started));
        let mut grant = message(
            asked.src,
            SM_PLACEMENT_LEASE,
            pack_placement_lease(&PlacementLease {
                hosts,
                valid_for: span,
            }),
        );
        grant.wid = asked.wid;
        rm.send(grant).expect("sent");
        let mut word = message(asked.src, 5, "behind the grant");
        word.ctx = 5;
        rm.send(word).expect("sent");
        assert_eq!(
            recv_next(task).tag,
            5,
            "a grant is no message to the program"
        );
        asked.wid
    })
}

/// Spawns tasks and checks that the request goes to the resource manager.
fn expect_rm_call(rm: &Runtime, task: &Runtime, what: SpawnRequest) {
    thread::scope(|scope| {
        let spawning = scope.spawn(|| task.spawn(what.clone()));
        let asked = recv_next(rm);
        assert_eq!(unpack_spawn(asked.body.clone()), Ok((what.clone(), None)));
        answer(rm, &asked, asked.wid, pack_tids(&[Err(PvmError::NoFile)]));
        assert_eq!(
            spawning.join().expect("ended"),
            Ok(vec![Err(PvmError::NoFile)])
        );
    });
}

const CHILD: Tid = Tid::from_raw(0x40009);
const LEASE_DURATION: Micros = Micros::from_secs(3600);

/// Makes the daemon start leased tasks, except on the third host.
fn start_leased_tasks(fake: &FakeDaemon) {
    let start = |host: &HostId| match host.index() {
        3 => Err(PvmError::OutOfRes),
        _ => Ok(Tid::task(*host, 7).expect("a task")),
    };
    fake.set_responder(move |_, what| match what {
        Request::SpawnLeased { lease: grant, .. } => {
            Some(Reply::Spawned(grant.hosts.iter().map(start).collect()))
        }
        _ => None,
    });
}

/// A placement lease serves requests that differ from the leased request in the arguments only;
/// other requests go to the resource manager.
#[test]
fn lease_serves_similar_requests_only() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    let wid = spawn_with_lease(&rm, &task, CHILD, &[2, 1], LEASE_DURATION);
    let child = |host: u16| {
        Ok(vec![Ok(
            Tid::task(HostId::new(host).expect("a host"), 7).expect("a task")
        )])
    };
    assert_eq!(
        task.spawn(SpawnRequest {
            args: vec![b"other words".to_vec()],
            ..single_request()
        }),
        child(2)
    );
    let of = LeasedSpawn {
        rm: rm.tid(),
        wid,
        hosts: vec![HostId::new(2).expect("a host")],
    };
    fake.wait_for_request(
        "the request",
        |what| matches!(what, Request::SpawnLeased { lease: grant, request } if *grant == of && request.args.len() == 1),
    );
    assert_eq!(task.spawn(single_request()), child(1));
    expect_rm_call(&rm, &task, single_request());
    let others = [
        SpawnRequest {
            file: "other".into(),
            ..single_request()
        },
        SpawnRequest {
            flags: 1,
            ..single_request()
        },
        SpawnRequest {
            place: "there".into(),
            ..single_request()
        },
        SpawnRequest {
            env: vec![b"A=1".to_vec()],
            ..single_request()
        },
    ];
    for other in others {
        spawn_with_lease(&rm, &task, CHILD, &[1], LEASE_DURATION);
        expect_rm_call(&rm, &task, other);
    }
}

/// Of several leased tasks, only those that could not be started go to the resource manager.
#[test]
fn failed_leased_tasks_go_to_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    let three = SpawnRequest {
        count: 3,
        ..worker_request()
    };
    let at = |host: u16| Ok(Tid::task(HostId::new(host).expect("a host"), 7).expect("a task"));
    let grant =
        |hosts: &[u16]| spawn_several_with_lease(&rm, &task, &[CHILD; 3], (hosts, LEASE_DURATION));
    grant(&[1, 2, 1, 2, 1]);
    assert_eq!(task.spawn(three.clone()), Ok(vec![at(1), at(2), at(1)]));
    let rest = |answer_with: &[Result<Tid, PvmError>], expected: Vec<Result<Tid, PvmError>>| {
        thread::scope(|scope| {
            let spawning = scope.spawn(|| task.spawn(three.clone()));
            let asked = recv_next(&rm);
            let (wanted, _) = unpack_spawn(asked.body.clone()).expect("a request");
            assert_eq!(wanted.count as usize, answer_with.len());
            answer(&rm, &asked, asked.wid, pack_tids(answer_with));
            assert_eq!(spawning.join().expect("ended"), Ok(expected));
        });
    };
    let none = Err(PvmError::NoFile);
    rest(&[none; 3], vec![none; 3]);
    grant(&[3, 2, 3]);
    rest(&[at(4), none], vec![at(4), at(2), none]);
}

/// A spawn goes to the resource manager if its lease has expired, if a leased host fails, or if the
/// resource manager that granted the lease was replaced.
#[test]
fn invalid_lease_falls_back_to_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    spawn_with_lease(&rm, &task, CHILD, &[1], Micros(0));
    expect_rm_call(&rm, &task, single_request());
    spawn_with_lease(&rm, &task, CHILD, &[3], LEASE_DURATION);
    expect_rm_call(&rm, &task, single_request());
    spawn_with_lease(&rm, &task, CHILD, &[1], LEASE_DURATION);
    let other = fake.enroll();
    let changed = RmInfo {
        tid: other.tid(),
        services: RmServices {
            spawn: true,
            other_requests: false,
            task_exits: true,
        },
    };
    fake.send_control(task.tid(), ToTask::RmChanged { rm: Some(changed) });
    wait_until("the news", || (task.rm() == Some(changed)).then_some(()));
    expect_rm_call(&other, &task, single_request());
}

/// The resource manager's own requests go to the daemon.
#[test]
fn rm_itself_uses_daemon() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.set_responder(|_, what| {
        (*what == Request::Config).then(|| Reply::Hosts(HostTable::default()))
    });
    fake.send_control(
        task.tid(),
        ToTask::RmChanged {
            rm: Some(RmInfo {
                tid: task.tid(),
                services: SERVES_ALL,
            }),
        },
    );
    wait_until("the news", || task.rm());
    assert_eq!(task.config(), Ok(HostTable::default()));
}

/// A notification request to the resource manager has the documented format.
#[test]
fn notify_message_has_documented_format() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    let tids = vec![Tid::from_raw(0x40005), Tid::from_raw(0x40006)];
    task.notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(tids),
        ctx: 3,
        tag: 4,
        cancel: true,
    })
    .expect("sent");
    let asked = recv_next(&rm);
    let words = Unpacker::xdr(asked.body.clone()).ints(6);
    assert_eq!(
        (asked.tag, words),
        (SM_NOTIFY, Ok(vec![257, 3, 4, 2, 0x40005, 0x40006]))
    );
}

/// Malformed answers of a resource manager are errors.
#[test]
fn malformed_rm_answers_are_errors() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, SERVES_ALL);
    let mut negative = Packer::new(Encoding::Xdr);
    negative.int(PvmError::OutOfRes.code());
    let mut many = Packer::new(Encoding::Xdr);
    many.int(i32::MAX).int(1);
    for body in [
        bytes::Bytes::new(),
        negative.finish(),
        many.finish(),
        pack_tids(&[Ok(Tid::from_raw(0x40009))]),
    ] {
        let asks: [fn(&Runtime) -> bool; 3] = [
            |t| t.spawn(worker_request()).is_err(),
            |t| t.config().is_err(),
            |t| t.add_hosts(vec!["a".into(), "b".into()]).is_err(),
        ];
        for ask in asks {
            thread::scope(|scope| {
                let asking = scope.spawn(|| ask(&task));
                let asked = recv_next(&rm);
                answer(&rm, &asked, asked.wid, body.clone());
                assert!(asking.join().expect("no panic"));
            });
        }
    }
}

/// A reply of the wrong kind is a protocol error; a failure keeps its code and reason.
#[test]
fn reply_of_wrong_kind_is_an_error() {
    let fake = FakeDaemon::start();
    let vm = Vm::from_runtime(fake.enroll());
    fake.set_responder(|_, _| Some(Reply::Done));
    assert_eq!(vm.config().expect_err("not a table").code, PvmError::BadMsg);
    assert_eq!(
        vm.events(0, 1).expect_err("no events").code,
        PvmError::BadMsg
    );
    fake.set_responder(|_, _| {
        Some(Reply::Failed {
            error: PvmError::NoHost,
            reason: "there is no host x".into(),
        })
    });
    assert_eq!(
        vm.tasks(Tid::NONE).expect_err("failed").to_string(),
        "there is no host x"
    );
}

/// An order of the resource manager to start tasks goes to the daemon of the host.
#[test]
fn exec_goes_to_daemon_of_host() {
    let fake = FakeDaemon::start();
    let vm = Vm::from_runtime(fake.enroll());
    let host = sempa_proto::HostId::new(2).expect("an index");
    let wid = vm
        .request_exec(host, vm.tid(), &worker_request())
        .expect("sent");
    let got = fake.wait_for_log("the order", |_, said| match said {
        ToDaemon::Message(m) => Some(m.clone()),
        _ => None,
    });
    assert_eq!(
        (got.dst, got.tag, got.wid),
        (host.daemon_tid(), sempa_proto::sm::SM_EXEC, wid)
    );
}
