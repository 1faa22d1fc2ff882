//! Tests of commands against a virtual machine that answers from tables.

mod hosts_and_tasks;
mod jobs;
mod lines;
mod resource_manager;

use super::execute;
use crate::fixtures::{host, table, task};
use crate::outcome::Outcome;
use crate::session::Session;
use crate::virtual_machine::VirtualMachine;
use libpvm::{Error, MigrateError};
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::engine::Engine;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::message::{CTX_BASE, ENC_XDR};
use sempa_proto::migration::{Failure, MigrationTargets, Refusal, Step};
use sempa_proto::rm::{
    JobUsage, RmQuery, RmReply, SuspensionInfo, TaskOutcome, TaskUsage, UsageTotals, UserUsage,
    WaitingSpawn,
};
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::{
    MailboxClass, MailboxRequest, MigrationError, MigrationReport, Reply, Request, SpawnRequest,
};
use sempa_proto::{HostId, Message, Micros, MigrationId, PvmError, Tid};
use std::cell::RefCell;

const CONSOLE: Tid = Tid::from_raw(0x40001);

/// Answers from tables and records the requests.
#[derive(Default)]
struct FakeVm {
    requests: RefCell<Vec<Request>>,
    spawned: RefCell<Vec<SpawnRequest>>,
    sent: RefCell<Vec<Message>>,
}

fn suspended() -> SuspensionInfo {
    SuspensionInfo {
        since: Micros(5),
        cause: sempa_proto::suspend::SuspendCause::JobRequested {
            requested_by: Tid::from_raw(0x80001),
        },
    }
}

fn waiting_spawn() -> WaitingSpawn {
    let (program, why) = (
        "worker".into(),
        "no host is free: h1: owner present (olga on pts/1)".into(),
    );
    let (by, job) = (Tid::from_raw(0x40003), Tid::from_raw(0x40002));
    WaitingSpawn {
        program,
        count: 3,
        requested_by: by,
        job,
        user: 7,
        since: Micros(5),
        queue_position: 1,
        why,
    }
}

/// Returns the resource manager's answer about a job with two tasks, one of which is suspended.
fn job_reply(job: Tid) -> RmReply {
    let used = |n: i32| TaskUsage {
        tid: Tid::from_raw(0x40002 + n),
        job,
        user: 7,
        program: "worker".into(),
        host: "ha1".into(),
        started: Micros(0),
        ended: (n == 3).then_some((Micros(5), TaskOutcome::Status(0x300))),
        used: sempa_proto::migration::Usage::default(),
        migrations: 0,
        evictions: 0,
        counts_toward_limits: true,
        suspended: (n == 1).then(suspended),
        suspended_total: Micros(0),
    };
    let tasks = (0..=1).map(used).collect();
    let (sums, program) = (UsageTotals::default(), "master".into());
    let (began, suspended) = (Micros(0), Some(suspended()));
    RmReply::Job {
        job: JobUsage {
            job,
            user: 7,
            program,
            started: began,
            ended: None,
            totals: sums,
            suspended,
        },
        tasks,
    }
}

impl VirtualMachine for FakeVm {
    fn tid(&self) -> Tid {
        CONSOLE
    }

    fn local_host(&self) -> HostId {
        HostId::MASTER
    }

    fn hosts(&self) -> Result<HostTable, Error> {
        Ok(table())
    }

    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let all = [
            task(0xc0001, 0x40002, 12, 6, "child"),
            task(0x40001, 0, 10, 4, ""),
            task(0x40002, -35, 11, 6, "parent"),
        ];
        let wanted = |task: &TaskInfo| {
            selector == Tid::NONE || task.host.tid() == selector || task.tid == selector
        };
        Ok(all.into_iter().filter(wanted).collect())
    }

    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let found = request.file != "nofile";
        self.spawned.borrow_mut().push(request);
        Ok(vec![if found {
            Ok(Tid::from_raw(0x80001))
        } else {
            Err(PvmError::NoFile)
        }])
    }

    fn add(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error> {
        let one = |line: &String| match line.as_str() {
            "ha9" => AddedHost {
                result: Ok(host(9, "ha9")),
                reason: String::new(),
            },
            _ => AddedHost {
                result: Err(PvmError::CantStart),
                reason: "ssh: no route to it".into(),
            },
        };
        Ok(lines.iter().map(one).collect())
    }

    fn delete(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error> {
        let one = |name: &String| match name.as_str() {
            "nohost" => Err(PvmError::NoHost),
            "ha1" => Err(PvmError::BadParam),
            _ => Ok(()),
        };
        Ok(names.iter().map(one).collect())
    }

    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<MigrationTargets, Error> {
        if tid.raw() != 0x40002 {
            let refusal = Refusal::UnsupportedResource {
                what: "an io_uring ring".into(),
            };
            return Err(Error::new(
                PvmError::Denied,
                format!("{tid} cannot move: {refusal}"),
            ));
        }
        let file = Refusal::File {
            path: "/data".into(),
            why: "it does not exist on the target".into(),
        };
        let memory = Refusal::Memory { need: 9, have: 8 };
        let host = |n| HostId::new(n).expect("an index");
        let mut verdicts = vec![(host(2), vec![file, memory]), (host(3), Vec::new())];
        verdicts.truncate(if to.is_some() { 1 } else { 2 });
        Ok(MigrationTargets {
            tid,
            from: HostId::MASTER,
            resident_bytes: (4 << 20) + 1,
            verdicts,
            engines: Vec::new(),
        })
    }

    fn migrate(&self, tid: Tid, to: &str) -> Result<MigrationReport, MigrateError> {
        match to {
            "ha2" => Ok(MigrationReport {
                id: MigrationId(1),
                bytes: 4096,
                frozen: Micros(98_000),
                engine: Engine::Criu,
            }),
            "ha3" => Err(MigrationError {
                step: Step::Dump,
                why: Failure::Killed { signal: 9 },
            }
            .into()),
            "gone" => Err(Error::new(PvmError::SysErr, "the daemon is gone").into()),
            _ => Err(Error::new(PvmError::NoHost, format!("moving {tid}: no host {to}")).into()),
        }
    }

    fn events(&self, from: u64, _limit: u32) -> Result<Vec<Event>, Error> {
        let event = |number| Event {
            number,
            at: Micros(number),
            host: HostId::MASTER,
            kind: EventKind::Note {
                text: format!("number {number}"),
            },
        };
        // Two events per request, five in total.
        Ok((from..5).take(2).map(event).collect())
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.sent.borrow_mut().push(message);
        Ok(())
    }

    fn ask_rm(&self, question: &RmQuery) -> Result<RmReply, Error> {
        Ok(match question {
            RmQuery::Job(tid) if tid.raw() == 0x40002 => job_reply(*tid),
            RmQuery::Suspend { job, suspend } if job.raw() == 0x40003 => {
                let tid = |n: i32| Tid::from_raw(0x40002 + n);
                let others = if *suspend {
                    vec![(tid(0), "no daemon has started it".to_string())]
                } else {
                    vec![]
                };
                RmReply::Suspended {
                    job: tid(0),
                    tasks: vec![tid(1), tid(2)],
                    unchanged: others,
                }
            }
            RmQuery::Kill(job) | RmQuery::KillStatus(job) if job.raw() == 0x40002 => {
                let left = if matches!(question, RmQuery::Kill(_)) {
                    2
                } else {
                    0
                };
                RmReply::KillProgress {
                    job: *job,
                    asked: 1500,
                    forced: 3,
                    left,
                    failed: Vec::new(),
                }
            }
            RmQuery::Kill(job) if job.raw() == 0x40003 => {
                let failed = vec![(
                    Tid::from_raw(0x40005),
                    "its daemon does not answer".to_string(),
                )];
                RmReply::KillProgress {
                    job: *job,
                    asked: 2,
                    forced: 0,
                    left: 0,
                    failed,
                }
            }
            RmQuery::CancelVacated(tid) if tid.raw() == 0x40009 => RmReply::VacatedCancelled {
                job: *tid,
                checkpoint: "c7".into(),
                starting: false,
            },
            RmQuery::Users { .. } => RmReply::Users(vec![UserUsage {
                user: 7,
                totals: UsageTotals::default(),
                index: 1.5,
            }]),
            RmQuery::Jobs { .. } => RmReply::Jobs(Vec::new()),
            RmQuery::WaitingSpawns { user } => RmReply::WaitingSpawns(match user {
                Some(9) => Vec::new(),
                _ => vec![waiting_spawn()],
            }),
            _ => RmReply::NotFound,
        })
    }

    fn ask(&self, request: Request) -> Result<Reply, Error> {
        let reply = match &request {
            Request::HostStatus { name } if name == "nohost" => Err(PvmError::NoHost.into()),
            Request::TaskStatus { tid } if !tid.is_task() => Err(PvmError::BadParam.into()),
            Request::Mailbox(MailboxRequest::List { .. }) => {
                Ok(Reply::MailboxClasses(vec![MailboxClass {
                    name: "svc".into(),
                    entries: vec![(0, CONSOLE, 0)],
                }]))
            }
            Request::Mailbox(MailboxRequest::Put { .. }) => Ok(Reply::MailboxIndex(0)),
            Request::DebugQuery(_) => Ok(Reply::Numbers(vec![3])),
            _ => Ok(Reply::Done),
        };
        self.requests.borrow_mut().push(request);
        reply
    }
}

fn session() -> Session<FakeVm> {
    let env = [("HOME", "/h"), ("COLOUR", "red")]
        .map(|(name, value)| (name.to_string(), value.to_string()));
    Session::new(FakeVm::default(), env.into_iter().collect())
}

fn as_session(session: &mut Session<FakeVm>) -> &mut Session {
    session
}

fn run_line(session: &mut Session<FakeVm>, line: &str) -> Outcome {
    execute::run_line(session, line)
}

fn run_ok(session: &mut Session<FakeVm>, line: &str) -> String {
    let outcome = run_line(session, line);
    assert!(!outcome.failed, "{line}: {outcome:?}");
    outcome.text
}

/// Handles a message that no command waits for.
fn handle_message(session: &mut Session<FakeVm>, message: &Message) -> Vec<u8> {
    as_session(session).handle_message(message)
}

fn output_message(tag: i32, tid: i32, words: &[i32], bytes: &[u8]) -> Message {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(tid).items(words.iter().copied()).bytes(bytes);
    let src = HostId::MASTER.daemon_tid();
    Message {
        src,
        dst: CONSOLE,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    }
}
