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
    JobUsage, RmQuery, RmReply, SuspensionStart, TaskOutcome, TaskUsage, UsageTotals, UserUsage,
    WaitingSpawn,
};
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::{
    MailboxClass, MailboxRequest, MigrationError, MigrationReport, Reply, Request, SpawnRequest,
};
use sempa_proto::{HostId, Message, Micros, MigrationId, PvmError, Tid};
use std::cell::RefCell;
use std::ops::ControlFlow;

const CONSOLE: Tid = Tid::from_raw(0x40001);

/// A virtual machine that answers from tables and records the requests.
#[derive(Default)]
struct FakeVm {
    requests: RefCell<Vec<Request>>,
    spawn_requests: RefCell<Vec<SpawnRequest>>,
    sent_messages: RefCell<Vec<Message>>,
    /// Tasks that wait for the restart of their job.
    awaiting_tasks: RefCell<Vec<Tid>>,
    /// Processes that ended tasks have left behind.
    leftovers: RefCell<Vec<TaskInfo>>,
    /// Tasks that have exited.
    exited_tasks: RefCell<Vec<Tid>>,
}

fn suspension_info() -> SuspensionStart {
    SuspensionStart {
        since: Micros(5),
        cause: sempa_proto::suspend::SuspendCause::JobRequested {
            requested_by: Tid::from_raw(0x80001),
        },
    }
}

fn waiting_spawn() -> WaitingSpawn {
    let (program, reason) = (
        "worker".into(),
        "no host is free: h1: owner present (olga on pts/1)".into(),
    );
    let (requester, job) = (Tid::from_raw(0x40003), Tid::from_raw(0x40002));
    WaitingSpawn {
        program,
        task_count: 3,
        requested_by: requester,
        job,
        user: 7,
        since: Micros(5),
        queue_position: 1,
        last_result: reason,
    }
}

/// Returns the resource manager's answer about a job with two tasks, one of which is suspended.
fn job_reply(job: Tid) -> RmReply {
    let task_usage = |n: i32| TaskUsage {
        tid: Tid::from_raw(0x40002 + n),
        job,
        user: 7,
        program: "worker".into(),
        host: "ha1".into(),
        started_at: Micros(0),
        end: (n == 3).then_some((Micros(5), TaskOutcome::Status(0x300))),
        usage: sempa_proto::migration::Usage::default(),
        migrations: 0,
        evictions: 0,
        counts_toward_limits: true,
        suspension: (n == 1).then(suspension_info),
        suspended_time: Micros(0),
    };
    let tasks = (0..=1).map(task_usage).collect();
    let (usage_totals, program) = (UsageTotals::default(), "master".into());
    let (started_at, job_suspension) = (Micros(0), Some(suspension_info()));
    RmReply::Job {
        job: JobUsage {
            job,
            user: 7,
            program,
            started_at,
            ended_at: None,
            totals: usage_totals,
            suspension: job_suspension,
        },
        tasks,
    }
}

impl FakeVm {
    fn add_hosts(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error> {
        let add_host = |line: &String| match line.as_str() {
            "ha9" => AddedHost {
                result: Ok(host(9, "ha9")),
                reason: String::new(),
            },
            _ => AddedHost {
                result: Err(PvmError::CantStart),
                reason: "ssh: no route to it".into(),
            },
        };
        Ok(lines.iter().map(add_host).collect())
    }

    fn migrate_and_wait(&self, tid: Tid, target: &str) -> Result<MigrationReport, MigrateError> {
        match target {
            "ha2" => Ok(MigrationReport {
                id: MigrationId(1),
                image_bytes: 4096,
                frozen_time: Micros(98_000),
                engine: Engine::Criu,
            }),
            "ha3" => Err(MigrationError {
                step: Step::Dump,
                failure: Failure::Killed { signal: 9 },
            }
            .into()),
            "gone" => Err(Error::new(PvmError::SysErr, "the daemon is gone").into()),
            _ => {
                Err(Error::new(PvmError::NoHost, format!("moving {tid}: no host {target}")).into())
            }
        }
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
        self.requests.borrow_mut().push(Request::Tasks { selector });
        let all_tasks = [
            task(0xc0001, 0x40002, 12, 6, "child"),
            task(0x40001, 0, 10, 4, ""),
            task(0x40002, -35, 11, 6, "parent"),
        ];
        let is_selected = |task: &TaskInfo| {
            selector == Tid::NONE || task.host.tid() == selector || task.tid == selector
        };
        Ok(all_tasks.into_iter().filter(is_selected).collect())
    }

    fn tasks_and_leftovers(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        let mut tasks = self.tasks(selector)?;
        tasks.extend(self.leftovers.borrow().iter().cloned());
        Ok(tasks)
    }

    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        let program_exists = request.program != "nofile";
        self.spawn_requests.borrow_mut().push(request);
        Ok(vec![if program_exists {
            Ok(Tid::from_raw(0x80001))
        } else {
            Err(PvmError::NoFile)
        }])
    }

    fn ask_while(
        &self,
        request: Request,
        _on_wait: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Reply>, Error> {
        let reply = match request {
            Request::AddHosts { host_file_lines } => {
                Reply::HostsAdded(self.add_hosts(&host_file_lines)?)
            }
            Request::Migrate { tid, target, .. } => match self.migrate_and_wait(tid, &target) {
                Ok(report) => Reply::Migrated(Ok(report)),
                Err(MigrateError::Failed(error)) => Reply::Migrated(Err(error)),
                Err(MigrateError::Refused(error)) => return Err(error),
            },
            request => self.ask(request)?,
        };
        Ok(Some(reply))
    }

    fn delete_hosts(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error> {
        let delete_host = |name: &String| match name.as_str() {
            "nohost" => Err(PvmError::NoHost),
            "ha1" => Err(PvmError::BadParam),
            _ => Ok(()),
        };
        Ok(names.iter().map(delete_host).collect())
    }

    fn can_migrate(&self, tid: Tid, target: Option<&str>) -> Result<MigrationTargets, Error> {
        if tid.raw() != 0x40002 {
            let resource_refusal = Refusal::UnsupportedResource {
                what: "an io_uring ring".into(),
            };
            return Err(Error::new(
                PvmError::Denied,
                format!("{tid} cannot move: {resource_refusal}"),
            ));
        }
        let file_refusal = Refusal::File {
            path: "/data".into(),
            why: "it does not exist on the target".into(),
        };
        let memory_refusal = Refusal::Memory { need: 9, have: 8 };
        let host = |n| HostId::new(n).expect("an index");
        let mut verdicts = vec![
            (host(2), vec![file_refusal, memory_refusal]),
            (host(3), Vec::new()),
        ];
        verdicts.truncate(if target.is_some() { 1 } else { 2 });
        Ok(MigrationTargets {
            tid,
            from: HostId::MASTER,
            memory_bytes: (4 << 20) + 1,
            verdicts,
            usable_engines: Vec::new(),
        })
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

    fn ask_master(
        &self,
        _master: Tid,
        _question: &sempa_work_dispatch::Question,
    ) -> Result<String, Error> {
        Ok(r#"{"summary":"3 finished","progress":{"finished":3}}"#.to_string())
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.sent_messages.borrow_mut().push(message);
        Ok(())
    }

    fn ask_rm(&self, query: &RmQuery) -> Result<RmReply, Error> {
        Ok(match query {
            RmQuery::Job(tid) if tid.raw() == 0x40002 => job_reply(*tid),
            RmQuery::Suspend { job, suspend } if job.raw() == 0x40003 => {
                let tid = |n: i32| Tid::from_raw(0x40002 + n);
                let unchanged_tasks = if *suspend {
                    vec![(tid(0), "no daemon has started it".to_string())]
                } else {
                    vec![]
                };
                RmReply::Suspended {
                    job: tid(0),
                    tasks: vec![tid(1), tid(2)],
                    unchanged_tasks,
                }
            }
            RmQuery::Kill(job) | RmQuery::KillStatus(job) if job.raw() == 0x40002 => {
                let remaining_count = if matches!(query, RmQuery::Kill(_)) {
                    2
                } else {
                    0
                };
                RmReply::KillProgress {
                    job: *job,
                    exit_requests: 1500,
                    forced_kills: 3,
                    remaining_tasks: remaining_count,
                    signal_failures: Vec::new(),
                }
            }
            RmQuery::Kill(job) if job.raw() == 0x40003 => {
                let signal_failures = vec![(
                    Tid::from_raw(0x40005),
                    "its daemon does not answer".to_string(),
                )];
                RmReply::KillProgress {
                    job: *job,
                    exit_requests: 2,
                    forced_kills: 0,
                    remaining_tasks: 0,
                    signal_failures,
                }
            }
            RmQuery::CancelVacated(tid) if tid.raw() == 0x40009 => RmReply::VacatedCancelled {
                job: *tid,
                checkpoint: "c7".into(),
                restart_started: false,
            },
            RmQuery::Users { .. } => RmReply::Users(vec![UserUsage {
                user: 7,
                totals: UsageTotals::default(),
                up_down_index: 1.5,
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
            Request::TaskStatus { tid } if self.exited_tasks.borrow().contains(tid) => {
                Err(PvmError::NoTask.into())
            }
            Request::Mailbox(MailboxRequest::List { .. }) => {
                Ok(Reply::MailboxClasses(vec![MailboxClass {
                    name: "svc".into(),
                    entries: vec![(0, CONSOLE, 0)],
                }]))
            }
            Request::Mailbox(MailboxRequest::Put { .. }) => Ok(Reply::MailboxIndex(0)),
            Request::DebugQuery(_) => Ok(Reply::DebugValues(vec![3])),
            Request::FindAwaitingRestart { tids } => {
                let awaiting_tasks = self.awaiting_tasks.borrow();
                let awaits = |tid: &&Tid| awaiting_tasks.contains(*tid);
                Ok(Reply::AwaitingRestart(
                    tids.iter().filter(awaits).copied().collect(),
                ))
            }
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

fn run_successfully(session: &mut Session<FakeVm>, line: &str) -> String {
    let outcome = run_line(session, line);
    assert!(!outcome.failed, "{line}: {outcome:?}");
    outcome.text
}

/// Handles a message that no command waits for.
fn handle_message(session: &mut Session<FakeVm>, message: &Message) -> Vec<u8> {
    as_session(session).handle_message(message)
}

fn output_message(tag: i32, tid: i32, numbers: &[i32], bytes: &[u8]) -> Message {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(tid)
        .pack_items(numbers.iter().copied())
        .pack_bytes(bytes);
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
