//! Output and trace records of the jobs of a session: shows them, or writes them to files.

use super::jobs::{TaskEvent, read_output};
use super::options::{TRACE_BUFFER, TRACE_DETAIL};
use super::records::{HostProperties, RecordPrinter, Timestamp, preamble};
use super::{Session, trace_events};
use crate::clock::unix_micros;
use crate::output::{tables, time};
use libpvm::{Body, Error, Vm};
use nix::errno::Errno;
use sempa_proto::message::CTX_BASE;
use sempa_proto::task::Sink;
use sempa_proto::{HostId, Message, Tid};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

/// Tag of messages that announce hosts.
pub(crate) const TAG_HOSTS: i32 = 1;

/// Output of tasks of job n arrives with this tag plus n.
pub(crate) const TAG_JOBS: i32 = 16;

/// Trace records of tasks of job n arrive with this tag plus n.
pub(crate) const TAG_TRACES: i32 = 1 << 24;

/// The console sends itself this tag plus n to close the traced job n after its last records.
pub(crate) const TAG_CLOSE_JOB: i32 = 1 << 25;

/// Output files are readable only by their owner, because tasks may write confidential data.
const FILE_MODE: u32 = 0o600;

/// Destination of the output of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// The log of the virtual machine.
    Log,
    /// The console, which numbers the spawn as a job.
    Console,
    /// A file that must not exist yet.
    NewFile(String),
    /// A file that output is appended to.
    AppendedFile(String),
}

/// Destination of the trace records of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TraceOutput {
    Console,
    /// A file that must not exist yet.
    NewFile(String),
}

/// Where output and records of a job go.
#[derive(Debug, Default)]
pub(crate) struct JobOutput {
    /// True if output is shown on the console.
    to_console: bool,
    /// Receives the output in place of the console.
    file: Option<File>,
    /// Converts trace records, if the job is traced.
    trace: Option<JobTrace>,
}

/// Destination of a job's trace records.
#[derive(Debug, Default)]
struct JobTrace {
    records: RecordPrinter,
    /// Receives the records in place of the console.
    file: Option<File>,
}

impl JobOutput {
    /// Opens the files for the output and the trace records of a job. `trace` is `None` if the job
    /// is not traced.
    ///
    /// # Errors
    /// Fails if a file cannot be opened; the text is for the user.
    pub(crate) fn open(output: &Output, trace: Option<&TraceOutput>) -> Result<JobOutput, String> {
        let file = match output {
            Output::Log | Output::Console => None,
            Output::NewFile(path) => Some(open_file(
                path,
                OpenOptions::new().write(true).create_new(true),
            )?),
            Output::AppendedFile(path) => Some(open_file(
                path,
                OpenOptions::new().append(true).create(true),
            )?),
        };
        let trace = match trace {
            None => None,
            Some(TraceOutput::Console) => Some(JobTrace::default()),
            Some(TraceOutput::NewFile(path)) => {
                let file = open_file(path, OpenOptions::new().write(true).create_new(true))?;
                Some(JobTrace {
                    file: Some(file),
                    ..JobTrace::default()
                })
            }
        };
        Ok(JobOutput {
            to_console: *output == Output::Console,
            file,
            trace,
        })
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Handles an event of a task of this job. Returns what must be shown.
    fn handle_event(&mut self, job: u32, tid: Tid, event: &TaskEvent) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(JobTrace { records, file }) = &mut self.trace {
            if *event == TaskEvent::FirstSeen {
                out.extend_from_slice(
                    format!("[{job}] libpvmtrc: Task TID=0x{tid:x} Connected to Console\n")
                        .as_bytes(),
                );
            } else {
                let text = match event {
                    TaskEvent::Created => "CREATION".into(),
                    TaskEvent::Spawned => "GOTSPAWN".into(),
                    TaskEvent::Ended => "GOTEOF".into(),
                    TaskEvent::Line(line) => String::from_utf8_lossy(line),
                    TaskEvent::FirstSeen => unreachable!("it was looked at above"),
                };
                out.extend(
                    write_records(
                        file,
                        job,
                        tid,
                        &records.output_record(time_now(), tid, &text),
                    )
                    .into_bytes(),
                );
            }
        }
        let line: &[u8] = match event {
            TaskEvent::Line(line) => line,
            TaskEvent::Ended => b"EOF",
            TaskEvent::FirstSeen | TaskEvent::Created | TaskEvent::Spawned => return out,
        };
        let prefix = format!("[{job}:{tid}] ").into_bytes();
        let line = [prefix.as_slice(), line, b"\n"].concat();
        if let Some(file) = &mut self.file {
            out.extend(
                file.write_all(&line)
                    .err()
                    .map(|error| write_error_line(job, "output", &error))
                    .unwrap_or_default(),
            );
            if !out.is_empty() {
                self.file = None;
            }
        } else if self.to_console {
            out.extend(line);
        }
        out
    }
}

impl Session {
    /// Returns the environment variables of a traced task.
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

    /// Starts a job's trace with the header and the hosts of the virtual machine.
    pub(crate) fn start_trace(&mut self, job: u32) -> String {
        let me = self.vm.tid();
        let Some(JobTrace { records, file }) = self
            .job_outputs
            .get_mut(&job)
            .and_then(|job| job.trace.as_mut())
        else {
            return String::new();
        };
        let mut out = write_records(file, job, me, &preamble(&time::ctime(unix_micros())));
        for host in self.vm.hosts().map(|table| table.hosts).unwrap_or_default() {
            let facts = HostProperties {
                tid: host.id.tid(),
                name: &host.name,
                arch: &host.arch,
                speed: host.speed,
            };
            out.push_str(&write_records(
                file,
                job,
                host.id.tid(),
                &records.host_record(time_now(), &facts),
            ));
        }
        out
    }

    /// Handles a message that no command waits for: output or records of a job, or new hosts.
    /// Returns what must be shown.
    pub(crate) fn handle_message(&mut self, message: &Message) -> Vec<u8> {
        if message.ctx != CTX_BASE {
            return Vec::new();
        }
        let number = |base: i32| {
            message
                .tag
                .checked_sub(base)
                .and_then(|number| u32::try_from(number).ok())
        };
        if let Some(job) = number(TAG_CLOSE_JOB) {
            return if message.src == self.vm.tid() {
                self.close_job(job)
            } else {
                Vec::new()
            };
        }
        if let Some(job) = number(TAG_TRACES) {
            return self.handle_records(job, message);
        }
        if !message.src.is_daemon() {
            return Vec::new();
        }
        if message.tag == TAG_HOSTS {
            return self.announce_hosts(message).into_bytes();
        }
        number(TAG_JOBS)
            .map(|job| self.handle_output(job, message))
            .unwrap_or_default()
    }

    fn handle_output(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let Ok(body) = Vm::unpack(message) else {
            return Vec::new();
        };
        let Some((tid, what)) = read_output(body) else {
            return Vec::new();
        };
        let update = self.jobs.handle(job, tid, what);
        let mut shown = Vec::new();
        if let Some(collected) = self.job_outputs.get_mut(&job) {
            for event in &update.events {
                shown.extend(collected.handle_event(job, tid, event));
            }
            if update.finished && collected.trace.is_some() {
                shown.extend_from_slice(
                    format!("[{job}] libpvmtrc: Trace File Complete\n").as_bytes(),
                );
                if self.schedule_close(job).is_ok() {
                    return shown;
                }
            }
        }
        if update.finished {
            shown.extend(self.close_job(job));
        }
        shown
    }

    /// Schedules the end of a traced job. The last records of its tasks arrive directly after the
    /// ends of their outputs: once every daemon has replied, they are here, and a message that the
    /// console sends itself arrives after them.
    fn schedule_close(&self, job: u32) -> Result<(), Error> {
        self.vm.tasks(Tid::NONE)?;
        let (me, Body { enc, bytes }) = (self.vm.tid(), Body::empty());
        let tag = TAG_CLOSE_JOB + job.cast_signed();
        self.vm.send(Message {
            src: me,
            dst: me,
            ctx: CTX_BASE,
            tag,
            wid: 0,
            enc,
            body: bytes,
        })
    }

    fn close_job(&mut self, job: u32) -> Vec<u8> {
        self.job_outputs.remove(&job);
        format!("[{job}] finished\n").into_bytes()
    }

    fn handle_records(&mut self, job: u32, message: &Message) -> Vec<u8> {
        let Some(JobTrace { records, file }) = self
            .job_outputs
            .get_mut(&job)
            .and_then(|job| job.trace.as_mut())
        else {
            return Vec::new();
        };
        let mut text = String::new();
        let read = Vm::unpack(message)
            .map_err(|error| error.code)
            .and_then(|mut body| records.read(&mut body, &mut text));
        let mut shown = write_records(file, job, message.src, &text);
        if let Err(error) = read {
            shown.push_str(&format!(
                "[{job}] trace records of {} cannot be read: {error}\n",
                message.src
            ));
        }
        shown.into_bytes()
    }

    fn announce_hosts(&mut self, message: &Message) -> String {
        let Ok(mut body) = Vm::unpack(message) else {
            return String::new();
        };
        let Ok(tids) = body.int().and_then(|count| body.ints(count)) else {
            return String::new();
        };
        let hosts = tids
            .into_iter()
            .filter_map(|tid| Tid::from_raw(tid).birth_host());
        let new: Vec<HostId> = hosts
            .filter(|host| self.announced_hosts.insert(*host))
            .collect();
        if new.is_empty() {
            return String::new();
        }
        self.vm
            .hosts()
            .map(|table| tables::new_hosts(&table, &new))
            .unwrap_or_default()
    }
}

/// Writes records to the file if there is one. Returns what must be shown.
fn write_records(file: &mut Option<File>, job: u32, from: Tid, text: &str) -> String {
    match file {
        None => text
            .lines()
            .map(|line| format!("[T{job}:{from}] {line}\n"))
            .collect(),
        Some(open) => match open.write_all(text.as_bytes()) {
            Ok(()) => String::new(),
            Err(error) => {
                *file = None;
                String::from_utf8(write_error_line(job, "trace", &error)).expect("a line of ours")
            }
        },
    }
}

fn write_error_line(job: u32, stream: &str, error: &std::io::Error) -> Vec<u8> {
    format!("[{job}] cannot write its {stream} to the file any more: {error}\n").into_bytes()
}

fn time_now() -> Timestamp {
    let now = unix_micros().0;
    Timestamp {
        seconds: now / 1_000_000,
        micros: (now % 1_000_000) as u32,
    }
}

fn open_file(path: &str, options: &mut OpenOptions) -> Result<File, String> {
    options.mode(FILE_MODE).open(path).map_err(|error| {
        let why = match error.kind() {
            std::io::ErrorKind::AlreadyExists => "File exists".to_string(),
            // Omits the error number that the standard library adds.
            _ => error.raw_os_error().map_or_else(
                || error.to_string(),
                |number| Errno::from_raw(number).desc().into(),
            ),
        };
        format!("{path}: {why}")
    })
}

/// Returns the destination of messages that a task's daemon sends to the console with this tag.
pub(crate) fn sink(tid: Tid, tag: i32) -> Sink {
    Sink {
        tid,
        ctx: CTX_BASE,
        tag,
    }
}
