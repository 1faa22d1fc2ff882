//! Output and trace records of the jobs of a session: shows them, or writes them to files.

use super::jobs::{JobUpdate, TaskEvent, TaskOutput, read_output_message};
use super::options::{TRACE_BUFFER, TRACE_DETAIL};
use super::records::{HostProperties, RecordFormatter, Timestamp, trace_header};
use super::{Session, trace_events};
use crate::clock::unix_micros;
use crate::output::terminal::Terminal;
use crate::output::{tables, time};
use libpvm::{Error, Vm};
use nix::errno::Errno;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::output::LOST_TASK_LINE;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, Sink};
use sempa_proto::{HostId, Message, Tid};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

/// Tag of messages that announce hosts.
pub(crate) const TAG_HOSTS: i32 = 1;

/// Tag of the events of the log that this console follows: for `events --follow`, or while tasks of
/// its jobs wait for a restart.
pub(crate) const TAG_EVENTS: i32 = 2;

/// Base of the tags of output messages: output of tasks of job n has this tag plus n.
pub(crate) const TAG_OUTPUT_BASE: i32 = 16;

/// Base of the tags of trace messages: trace records of tasks of job n have this tag plus n.
pub(crate) const TAG_TRACE_BASE: i32 = 1 << 24;

/// Base of the tags of the exit notifications that follow the last trace records: after the end of
/// the output of a traced job n, the exit of each of its tasks has this tag plus n.
pub(crate) const TAG_CLOSE_JOB_BASE: i32 = 1 << 25;

/// Base of the tags of exit notifications: the exit of a task of job n has this tag plus n.
pub(crate) const TAG_EXIT_BASE: i32 = 1 << 26;

/// Line that is shown for each task of a job that rolls back.
const ROLLBACK_LINE: &[u8] = b"waits for the restart of its job from the last checkpoint";

/// Output files are readable only by their owner, because tasks may write confidential data.
const FILE_MODE: u32 = 0o600;

/// Destination of the output of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutputDestination {
    /// The log of the virtual machine.
    Log,
    /// The console. The spawn becomes a job with a number.
    Console,
    /// A file that must not exist yet.
    NewFile(String),
    /// A file to which output is appended.
    AppendedFile(String),
}

/// Destination of the trace records of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TraceDestination {
    Console,
    /// A file that must not exist yet.
    NewFile(String),
}

/// Destinations of the output and the trace records of a job.
#[derive(Debug, Default)]
pub(crate) struct JobOutput {
    /// True if the console shows the output.
    shows_output: bool,
    /// True if the output consists of the tasks' lines only, without prefixes and marks.
    is_raw: bool,
    /// File that receives the output instead of the console. `None` if the output does not go to a
    /// file, and after a write error.
    file: Option<File>,
    /// State of the trace. `None` if the job is not traced.
    trace: Option<JobTrace>,
}

/// A file for the output or the trace records of a job could not be opened. If only the trace file
/// could not be opened, the output file remains, without new output.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {}", io_error_text(source))]
pub(crate) struct FileOpenError {
    path: String,
    source: std::io::Error,
}

/// Converter and destination of a job's trace records.
#[derive(Debug, Default)]
struct JobTrace {
    formatter: RecordFormatter,
    /// File that receives the records instead of the console. `None` if the records do not go to a
    /// file, and after a write error.
    file: Option<File>,
    /// Tasks whose last records may be missing.
    open_tasks: BTreeSet<Tid>,
}

impl JobOutput {
    /// Opens the files for the output and the trace records of a job. If `is_raw` is true, the
    /// output consists of the tasks' lines only. `trace` is `None` if the job is not traced.
    ///
    /// # Errors
    /// Fails if a file cannot be opened.
    pub(crate) fn open(
        output: &OutputDestination,
        is_raw: bool,
        trace: Option<&TraceDestination>,
    ) -> Result<Self, FileOpenError> {
        let file = match output {
            OutputDestination::Log | OutputDestination::Console => None,
            OutputDestination::NewFile(path) => Some(open_file(
                path,
                OpenOptions::new().write(true).create_new(true),
            )?),
            OutputDestination::AppendedFile(path) => Some(open_file(
                path,
                OpenOptions::new().append(true).create(true),
            )?),
        };
        let trace = match trace {
            None => None,
            Some(TraceDestination::Console) => Some(JobTrace::default()),
            Some(TraceDestination::NewFile(path)) => {
                let file = open_file(path, OpenOptions::new().write(true).create_new(true))?;
                Some(JobTrace {
                    file: Some(file),
                    ..JobTrace::default()
                })
            }
        };
        Ok(Self {
            shows_output: *output == OutputDestination::Console,
            is_raw,
            file,
            trace,
        })
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Shows an event of a task of this job, or writes it to a file. Returns the bytes that the
    /// console must show.
    fn show_task_event(&mut self, job: u32, tid: Tid, event: &TaskEvent) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(JobTrace {
            formatter: record_formatter,
            file,
            open_tasks,
        }) = &mut self.trace
        {
            open_tasks.insert(tid);
            let text = match event {
                TaskEvent::Created => Some("CREATION".into()),
                TaskEvent::Spawned => Some("GOTSPAWN".into()),
                TaskEvent::Ended => Some("GOTEOF".into()),
                TaskEvent::Line(line) => Some(String::from_utf8_lossy(line)),
                TaskEvent::FirstSeen | TaskEvent::Lost | TaskEvent::RolledBack => None,
            };
            if *event == TaskEvent::FirstSeen {
                out.extend_from_slice(
                    format!("[{job}] libpvmtrc: Task TID=0x{tid:x} Connected to Console\n")
                        .as_bytes(),
                );
            }
            if let Some(text) = text {
                let record = record_formatter.output_record(current_timestamp(), tid, &text);
                out.extend(write_records(file, job, tid, &record).into_bytes());
            }
        }
        let line: &[u8] = match event {
            TaskEvent::Line(line) => line,
            TaskEvent::Ended => b"EOF",
            TaskEvent::Lost => LOST_TASK_LINE.as_bytes(),
            TaskEvent::RolledBack => ROLLBACK_LINE,
            TaskEvent::FirstSeen | TaskEvent::Created | TaskEvent::Spawned => return out,
        };
        let prefix = format!("[{job}:{tid}] ").into_bytes();
        let line = match event {
            TaskEvent::Line(_) if self.is_raw => [line, b"\n"].concat(),
            TaskEvent::Ended if self.is_raw => return out,
            TaskEvent::Lost | TaskEvent::RolledBack if self.is_raw => {
                Terminal.print_error(&format!("{tid}: {}", String::from_utf8_lossy(line)));
                return out;
            }
            _ => [prefix.as_slice(), line, b"\n"].concat(),
        };
        if let Some(file) = &mut self.file {
            out.extend(
                file.write_all(&line)
                    .err()
                    .map(|error| format_write_error(job, "output", &error))
                    .unwrap_or_default(),
            );
            if !out.is_empty() {
                self.file = None;
            }
        } else if self.shows_output {
            out.extend(line);
        }
        out
    }
}

impl Session {
    /// Returns the environment variables that configure tracing in a spawned task: event mask,
    /// buffer size and level of detail.
    pub(crate) fn trace_variables(&self) -> [Vec<u8>; 3] {
        [
            [
                b"PVMTMASK=",
                trace_events::with_unselectable_events(&self.event_mask).as_bytes(),
            ]
            .concat(),
            format!("PVMTRCBUF={}", self.options.value(TRACE_BUFFER)).into_bytes(),
            format!("PVMTRCOPT={}", self.options.value(TRACE_DETAIL)).into_bytes(),
        ]
    }

    /// Starts a job's trace with the header and the hosts of the virtual machine. Returns the text
    /// that the console must show; the text is empty if the job is not traced.
    pub(crate) fn start_trace(&mut self, job: u32) -> String {
        let console = self.vm.tid();
        let Some(JobTrace {
            formatter: record_formatter,
            file,
            ..
        }) = self
            .job_outputs
            .get_mut(&job)
            .and_then(|job| job.trace.as_mut())
        else {
            return String::new();
        };
        let mut out = write_records(
            file,
            job,
            console,
            &trace_header(&time::format_ctime(unix_micros())),
        );
        for host in self.vm.hosts().map(|table| table.hosts).unwrap_or_default() {
            let properties = HostProperties {
                tid: host.id.tid(),
                name: &host.name,
                arch: &host.arch,
                speed: host.speed,
            };
            out.push_str(&write_records(
                file,
                job,
                host.id.tid(),
                &record_formatter.host_record(current_timestamp(), &properties),
            ));
        }
        out
    }

    /// Handles a message that no command waits for: output or records of a job, or new hosts.
    /// Returns the bytes that the console must show.
    pub(crate) fn handle_message(&mut self, message: &Message) -> Vec<u8> {
        if message.ctx != CTX_BASE {
            return Vec::new();
        }
        let job_from_base = |base: i32| {
            message
                .tag
                .checked_sub(base)
                .and_then(|job_from_base| u32::try_from(job_from_base).ok())
        };
        if let Some(job) = job_from_base(TAG_EXIT_BASE) {
            return if message.src.is_daemon() {
                self.handle_exit(job, message)
            } else {
                Vec::new()
            };
        }
        if let Some(job) = job_from_base(TAG_CLOSE_JOB_BASE) {
            return if message.src.is_daemon() {
                self.handle_last_record(job, message)
            } else {
                Vec::new()
            };
        }
        if let Some(job) = job_from_base(TAG_TRACE_BASE) {
            return self.handle_records(job, message);
        }
        if !message.src.is_daemon() {
            return Vec::new();
        }
        if message.tag == TAG_HOSTS {
            return self.announce_hosts(message).into_bytes();
        }
        if message.tag == TAG_EVENTS {
            self.handle_log_event(message);
            return Vec::new();
        }
        job_from_base(TAG_OUTPUT_BASE)
            .map(|job| self.handle_output(job, message))
            .unwrap_or_default()
    }

    fn handle_output(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let Ok(body) = Vm::unpack(message) else {
            return Vec::new();
        };
        let Some((tid, output)) = read_output_message(body) else {
            return Vec::new();
        };
        let mut shown_bytes = Vec::new();
        if matches!(output, TaskOutput::End(_)) && self.jobs.is_running(job, tid) {
            // A process that was killed for a rollback ends its output like any other.
            shown_bytes = self.await_restart_if_rolled_back(job, tid);
        }
        let update = self.jobs.handle_output(job, tid, output);
        self.watch_tasks(job);
        shown_bytes.extend(self.show_update(job, tid, &update));
        shown_bytes
    }

    /// Handles the exit of a task of a job. The end of the output precedes the exit, so usually the
    /// task has ended already. Otherwise the task's host is lost, and the task is lost or waits for
    /// the restart of its job, or has already been restarted if this console is late.
    fn handle_exit(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let Ok(Ok(tid)) = Vm::unpack(message).map(|mut body| body.read_int()) else {
            return Vec::new();
        };
        let tid = Tid::from_raw(tid);
        if !self.jobs.is_running(job, tid) {
            return Vec::new();
        }
        let mut shown_bytes = self.await_restart_if_rolled_back(job, tid);
        if self.jobs.is_running(job, tid)
            && matches!(self.vm.ask(Request::TaskStatus { tid }), Ok(Reply::Done))
        {
            let update = self.jobs.handle_late_exit(job, tid);
            self.watch_tasks(job);
            shown_bytes.extend(self.show_update(job, tid, &update));
            return shown_bytes;
        }
        let update = self.jobs.handle_exit(job, tid);
        shown_bytes.extend(self.show_update(job, tid, &update));
        shown_bytes
    }

    /// If a task whose process has ended waits for a restart from a checkpoint, records that all
    /// running tasks of its job do so. Returns the bytes that the console must show.
    fn await_restart_if_rolled_back(&mut self, job: u32, ended_tid: Tid) -> Vec<u8> {
        let mut shown_bytes = Vec::new();
        for awaiting_task in self.find_rolled_back_tasks(job, ended_tid) {
            let update = self.jobs.handle_rollback(job, awaiting_task);
            shown_bytes.extend(self.show_update(job, awaiting_task, &update));
        }
        shown_bytes
    }

    /// If the task `ended_tid` waits for a restart from a checkpoint, returns all running tasks of
    /// its job of this console that do so. The events that end the wait follow; without them no
    /// task is returned.
    fn find_rolled_back_tasks(&mut self, job: u32, ended_tid: Tid) -> Vec<Tid> {
        let ended_tasks = vec![ended_tid];
        if self.ask_awaiting_restart(ended_tasks.clone()).as_ref() != Some(&ended_tasks) {
            return Vec::new();
        }
        if !self.follows_events {
            let subscription = Request::Subscribe {
                ctx: CTX_BASE,
                tag: TAG_EVENTS,
            };
            self.follows_events = self.vm.ask(subscription).is_ok();
        }
        if !self.follows_events {
            return Vec::new();
        }
        // The wait may have ended before the subscription, so this question follows it.
        self.ask_awaiting_restart(self.jobs.running_tasks(job))
            .unwrap_or_default()
    }

    /// Returns which of the tasks wait for a restart; `None` if the daemon does not answer.
    fn ask_awaiting_restart(&self, tids: Vec<Tid>) -> Option<Vec<Tid>> {
        match self.vm.ask(Request::FindAwaitingRestart { tids }) {
            Ok(Reply::AwaitingRestart(awaiting_tasks)) => Some(awaiting_tasks),
            _ => None,
        }
    }

    /// Handles an event of the log. If it may end the wait of tasks for a restart, requests the
    /// notifications of their exits again.
    fn handle_log_event(&mut self, message: &Message) {
        let mut changed_jobs = BTreeSet::new();
        match Vm::decode_event(message).map(|event| event.kind) {
            Some(EventKind::Restarted { tasks, .. }) => {
                for (tid, _) in tasks {
                    changed_jobs.extend(self.jobs.handle_restart(tid));
                }
            }
            Some(
                EventKind::RestartFailed { .. }
                | EventKind::CheckpointDamaged { .. }
                | EventKind::JobTakenOver { .. },
            ) => {}
            _ => return,
        }
        let waiting_tasks = self.jobs.tasks_awaiting_restart();
        if !waiting_tasks.is_empty() {
            let tids = waiting_tasks.iter().map(|(_, tid)| *tid).collect();
            let still_waiting = self.ask_awaiting_restart(tids).unwrap_or_default();
            for (job, tid) in waiting_tasks {
                if !still_waiting.contains(&tid) {
                    self.jobs.stop_awaiting_restart(job, tid);
                    changed_jobs.insert(job);
                }
            }
        }
        changed_jobs
            .into_iter()
            .for_each(|job| self.watch_tasks(job));
    }

    /// Requests a notification of the exit of each task of the job, because a task that is lost
    /// with its host does not end its output.
    pub(crate) fn watch_tasks(&mut self, job: u32) {
        let unwatched_tasks = self.jobs.take_unwatched(job);
        if unwatched_tasks.is_empty() {
            return;
        }
        // An error means that the console is waiting for too many notifications, or that the
        // daemon has ended, which ends all waits.
        let _ = self.vm.ask(Request::Notify(NotifyRequest {
            subjects: NotifySubjects::TaskExit(unwatched_tasks),
            ctx: CTX_BASE,
            tag: TAG_EXIT_BASE + job.cast_signed(),
            is_cancellation: false,
        }));
    }

    /// Applies an update to the output of its job. Returns the bytes that the console must show.
    fn show_update(&mut self, job: u32, tid: Tid, update: &JobUpdate) -> Vec<u8> {
        let mut shown_bytes = Vec::new();
        if self.first_job_failure == 0 {
            self.first_job_failure = update.finished_with.unwrap_or(0);
        }
        if let Some(job_output) = self.job_outputs.get_mut(&job) {
            for event in &update.events {
                shown_bytes.extend(job_output.show_task_event(job, tid, event));
            }
            if update.is_finished()
                && let Some(trace) = &job_output.trace
            {
                shown_bytes.extend_from_slice(
                    format!("[{job}] libpvmtrc: Trace File Complete\n").as_bytes(),
                );
                let tids = trace.open_tasks.iter().copied().collect();
                if self.await_last_records(job, tids).is_ok() {
                    return shown_bytes;
                }
            }
        }
        if update.is_finished() {
            shown_bytes.extend(self.end_job_output(job));
        }
        shown_bytes
    }

    /// Called when all tasks of a traced job have ended. The last trace records of a task follow
    /// the end of its output, and precede the notification of its exit, which is requested here.
    fn await_last_records(&self, job: u32, tids: Vec<Tid>) -> Result<(), Error> {
        self.vm.ask(Request::Notify(NotifyRequest {
            subjects: NotifySubjects::TaskExit(tids),
            ctx: CTX_BASE,
            tag: TAG_CLOSE_JOB_BASE + job.cast_signed(),
            is_cancellation: false,
        }))?;
        Ok(())
    }

    /// Handles the exit of a task of a traced job whose output has ended. After the last exit, no
    /// record is missing.
    fn handle_last_record(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let trace = self
            .job_outputs
            .get_mut(&job)
            .and_then(|job| job.trace.as_mut());
        let Some(trace) = trace else {
            return Vec::new();
        };
        if let Ok(Ok(tid)) = Vm::unpack(message).map(|mut body| body.read_int()) {
            trace.open_tasks.remove(&Tid::from_raw(tid));
        }
        if trace.open_tasks.is_empty() {
            self.end_job_output(job)
        } else {
            Vec::new()
        }
    }

    fn end_job_output(&mut self, job: u32) -> Vec<u8> {
        let ended_output = self.job_outputs.remove(&job);
        if ended_output.is_some_and(|output| output.is_raw) {
            return Vec::new();
        }
        format!("[{job}] finished\n").into_bytes()
    }

    fn handle_records(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let Some(JobTrace {
            formatter: record_formatter,
            file,
            ..
        }) = self
            .job_outputs
            .get_mut(&job)
            .and_then(|job| job.trace.as_mut())
        else {
            return Vec::new();
        };
        let mut text = String::new();
        let read_result = Vm::unpack(message)
            .map_err(|error| error.code)
            .and_then(|mut body| record_formatter.append_message(&mut body, &mut text));
        let mut shown_text = write_records(file, job, message.src, &text);
        if let Err(error) = read_result {
            shown_text.push_str(&format!(
                "[{job}] trace records of {} cannot be read: {error}\n",
                message.src
            ));
        }
        shown_text.into_bytes()
    }

    fn announce_hosts(&mut self, message: &Message) -> String {
        let Ok(mut body) = Vm::unpack(message) else {
            return String::new();
        };
        let Ok(tids) = body.read_int().and_then(|count| body.read_ints(count)) else {
            return String::new();
        };
        let hosts = tids
            .into_iter()
            .filter_map(|tid| Tid::from_raw(tid).birth_host());
        let new_hosts: Vec<HostId> = hosts
            .filter(|host| self.announced_hosts.insert(*host))
            .collect();
        if new_hosts.is_empty() {
            return String::new();
        }
        self.vm
            .hosts()
            .map(|table| tables::new_hosts_text(&table, &new_hosts))
            .unwrap_or_default()
    }
}

/// Writes records to the file if there is one. Returns the text that the console must show.
fn write_records(file: &mut Option<File>, job: u32, sender: Tid, text: &str) -> String {
    match file {
        None => text
            .lines()
            .map(|line| format!("[T{job}:{sender}] {line}\n"))
            .collect(),
        Some(trace_file) => match trace_file.write_all(text.as_bytes()) {
            Ok(()) => String::new(),
            Err(error) => {
                *file = None;
                String::from_utf8(format_write_error(job, "trace", &error)).expect("a line of ours")
            }
        },
    }
}

fn format_write_error(job: u32, stream: &str, error: &std::io::Error) -> Vec<u8> {
    format!("[{job}] cannot write its {stream} to the file any more: {error}\n").into_bytes()
}

fn current_timestamp() -> Timestamp {
    let now_us = unix_micros().0;
    Timestamp {
        seconds: now_us / 1_000_000,
        micros: (now_us % 1_000_000) as u32,
    }
}

fn open_file(path: &str, options: &mut OpenOptions) -> Result<File, FileOpenError> {
    options
        .mode(FILE_MODE)
        .open(path)
        .map_err(|source| FileOpenError {
            path: path.to_string(),
            source,
        })
}

/// Returns the text of an error without the error number that the standard library adds.
fn io_error_text(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AlreadyExists => "File exists".to_string(),
        _ => error.raw_os_error().map_or_else(
            || error.to_string(),
            |number| Errno::from_raw(number).desc().into(),
        ),
    }
}

/// Returns the destination of messages that a task's daemon sends to the console with this tag.
pub(crate) fn console_sink(tid: Tid, tag: i32) -> Sink {
    Sink {
        tid,
        ctx: CTX_BASE,
        tag,
    }
}
