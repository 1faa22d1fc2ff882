//! Helpers of the tests: the built library, C programs that are linked with it, and a fake daemon
//! that serves one task.

#![allow(dead_code)] // Each test file uses its part.

pub(crate) mod vm;

use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::table::{HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    Claim, MailboxClass, MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, Sink,
    ToDaemon, ToTask, Welcome,
};
use sempa_proto::{HostId, Message, Micros, PvmError, Tid};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Returns the path of the library that the test run has built.
pub(crate) fn built_library() -> PathBuf {
    let test_program = std::env::current_exe().expect("a test has a path");
    let directories = test_program.ancestors().skip(1).take(2);
    let library_path = directories
        .map(|folder| folder.join("libpvm3.so"))
        .find(|path| path.is_file());
    library_path.expect("cargo builds the library before its tests")
}

/// Returns the directory of the headers in the source tree.
pub(crate) fn include_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Fails a test if a file of a Debian package does not exist.
///
/// # Panics
/// The file does not exist.
pub(crate) fn require_file(path: &str, package: &str) {
    assert!(
        Path::new(path).exists(),
        "cannot run here: {path} is missing: install {package}"
    );
}

/// Returns a command for the C compiler: the variable `CC`, by default `cc`.
pub(crate) fn c_compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

/// Runs the compiler and returns its output. If the compiler fails, the test fails with the
/// compiler's messages.
pub(crate) fn run_compiler(command: &mut Command) -> String {
    let output = command.output().expect("a C compiler");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compiles a C program with the header directory `include_dir` and links it with a library.
pub(crate) fn compile_and_link(
    source: &Path,
    include_dir: &Path,
    options: &[&str],
    library: &Path,
    program: &Path,
) {
    let mut command = c_compiler();
    run_compiler(
        command
            .arg("-std=gnu11")
            .args(options)
            .arg("-I")
            .arg(include_dir)
            .arg(source)
            .arg("-o")
            .arg(program)
            .arg(library),
    );
}

/// Returns the path of a source file in `tests/c`.
pub(crate) fn source_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(format!("{name}.c"))
}

/// A compiled C program in a directory that also contains the library under the name that programs
/// load.
pub(crate) struct Program {
    dir: TempDir,
    path: PathBuf,
}

impl Program {
    /// Compiles `tests/c/<name>.c` with the header directory `include_dir` and links it with the
    /// library.
    pub(crate) fn compile(name: &str, include_dir: &Path) -> Self {
        Self::compile_with(
            name,
            include_dir,
            &["-Wall", "-Werror", "-Wno-stringop-overread"],
        )
    }

    /// Does the same as [`Program::compile`] with the given compiler options for warnings.
    pub(crate) fn compile_with(name: &str, include_dir: &Path, warnings: &[&str]) -> Self {
        Self::compile_in_new_dir(name, include_dir, warnings, |_| source_path(name))
    }

    /// Compiles this source text with the header of this project.
    pub(crate) fn compile_text(name: &str, text: &str, warnings: &[&str]) -> Self {
        Self::compile_in_new_dir(name, &include_dir(), warnings, |directory| {
            let source = directory.join(format!("{name}.c"));
            std::fs::write(&source, text).expect("writable");
            source
        })
    }

    fn compile_in_new_dir(
        name: &str,
        include_dir: &Path,
        warnings: &[&str],
        source: impl FnOnce(&Path) -> PathBuf,
    ) -> Self {
        let dir = TempDir::new().expect("a directory");
        let library_link = dir.path().join("libpvm3.so.3");
        std::os::unix::fs::symlink(built_library(), &library_link).expect("a link");
        let path = dir.path().join(name);
        compile_and_link(
            &source(dir.path()),
            include_dir,
            warnings,
            &library_link,
            &path,
        );
        Self { dir, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a command for the program. The program looks for its daemon in the directory `tmp`.
    pub(crate) fn command(&self, tmp: &Path) -> Command {
        let mut command = Command::new(&self.path);
        for name in [
            "PVMSOCK",
            "PVMEPID",
            "PVMCTX",
            "PVM_VMID",
            "PVM_EXPORT",
            "PVMTASK",
            "PVM_DPATH",
        ] {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", self.dir.path())
            .env("PVM_TMP", tmp)
            .env("PVM_ALLOW_ROOT", "1");
        command
    }
}

/// Fails the test with the program's output unless its status is zero.
pub(crate) fn assert_success(output: &Output) {
    let (stdout_text, stderr_text) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{}\n--- stdout\n{stdout_text}\n--- stderr\n{stderr_text}",
        output.status
    );
}

/// Tid of the task that the fake daemon serves.
pub(crate) const TASK_TID: i32 = 0x40001;
/// Tid that the fake daemon reports for a started task.
pub(crate) const CHILD_TID: i32 = 0x40002;

/// Tid of a parent that has exited before it sent the list of siblings.
pub(crate) const EXITED_PARENT_TID: i32 = 0x40008;
/// Name of a program that the fake daemon starts and loses before its output has ended.
const LOST_PROGRAM: &str = "lost";

/// Fake daemon that serves one task at a time: sends the welcome message and answers simple
/// requests.
pub(crate) struct FakeDaemon {
    tmp_dir: TempDir,
}

impl FakeDaemon {
    /// Listens on the socket to which a program connects if its `PVM_TMP` is [`FakeDaemon::tmp`].
    pub(crate) fn start() -> Self {
        Self::with_parent(Tid::NONE)
    }

    /// Does the same as [`FakeDaemon::start`]; the welcome message contains the tid of this parent.
    pub(crate) fn with_parent(parent: Tid) -> Self {
        let tmp = TempDir::new().expect("a directory");
        let tmp_path = tmp.path().to_string_lossy().into_owned();
        let paths = sempa_proto::runtime_paths::RuntimePaths::from_env(user_id(), |name| {
            (name == "PVM_TMP").then(|| tmp_path.clone())
        });
        let paths = paths.expect("a good place");
        std::fs::create_dir_all(paths.dir()).expect("the directory of the virtual machine");
        let listener = UnixListener::bind(paths.daemon_socket_path()).expect("a socket");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    TaskConnection {
                        stream,
                        parent,
                        mailbox: BTreeMap::new(),
                    }
                    .serve_until_closed()
                });
            }
        });
        Self { tmp_dir: tmp }
    }

    /// Returns the value of `PVM_TMP` for programs that must connect to this daemon.
    pub(crate) fn tmp(&self) -> &Path {
        self.tmp_dir.path()
    }
}

fn user_id() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").expect("this process").uid()
}

struct TaskConnection {
    stream: UnixStream,
    parent: Tid,
    mailbox: BTreeMap<(String, i32), Message>,
}

impl TaskConnection {
    fn send(&mut self, message: &ToTask) {
        // An error means that the program has ended, so no reply is needed.
        let _ = self
            .stream
            .write_all(&encode_control(message).expect("small"));
    }

    fn serve_until_closed(mut self) {
        let mut decoder = FrameDecoder::new();
        let mut buf = [0; 4096];
        loop {
            while let Some(frame) = decoder.next_frame().expect("the library writes frames") {
                match frame.decode_control::<ToDaemon>() {
                    Ok(ToDaemon::Hello(hello)) => self.send_welcome(hello.claim),
                    Ok(ToDaemon::Request { id, request }) => {
                        let reply = self.answer_request(request);
                        self.send(&ToTask::Reply { id, reply });
                    }
                    _ => (),
                }
            }
            match self.stream.read(&mut buf) {
                Ok(0) | Err(_) => return,
                Ok(n) => decoder.push(&buf[..n]),
            }
        }
    }

    fn send_welcome(&mut self, claim: Claim) {
        self.send(&ToTask::Welcome(Welcome {
            tid: Tid::from_raw(TASK_TID),
            parent: self.parent,
            host: HostId::MASTER,
            addresses: vec![],
            allows_automatic_routes: true,
            rm: None,
            output_sink: Sink::default(),
            trace_sink: Sink::default(),
            dsig: DSIG_X86_64,
            spawned: matches!(claim, Claim::Spawned { .. }),
            tracer_settings: None,
            past: Default::default(),
            restart_info: None,
            handoff: None,
        }));
        if self.parent.is_task() && self.parent.raw() != EXITED_PARENT_TID {
            self.send_siblings();
        }
    }

    /// Sends the list of siblings, as the library of the parent does.
    fn send_siblings(&mut self) {
        let mut body = sempa_proto::body::Packer::new(sempa_proto::body::Encoding::Xdr);
        body.pack_int(2).pack_int(TASK_TID).pack_int(CHILD_TID);
        self.send(&ToTask::Deliver {
            message: Message {
                src: self.parent,
                dst: Tid::from_raw(TASK_TID),
                ctx: sempa_proto::message::CTX_TASK_CONTROL,
                tag: 0x8003_000c_u32 as i32,
                wid: 0,
                enc: sempa_proto::message::ENC_XDR,
                body: body.finish(),
            },
            deliver_after: None,
        });
    }

    /// Sends output messages of a spawned task, as a daemon does. Each item of `marks_and_texts`
    /// contains the mark and the text of one message.
    fn send_child_output(&mut self, sink: Sink, tid: i32, marks_and_texts: &[(i32, &[u8])]) {
        for (mark, text) in marks_and_texts {
            let mut body = sempa_proto::body::Packer::new(sempa_proto::body::Encoding::Xdr);
            body.pack_int(tid).pack_int(*mark);
            if *mark > 0 {
                body.pack_bytes(text);
            } else if *mark < 0 {
                body.pack_int(TASK_TID);
            }
            self.send(&ToTask::Deliver {
                message: Message {
                    src: Tid::MY_DAEMON,
                    dst: sink.tid,
                    ctx: sink.ctx,
                    tag: sink.tag,
                    wid: 0,
                    enc: sempa_proto::message::ENC_XDR,
                    body: body.finish(),
                },
                deliver_after: None,
            });
        }
    }

    /// Notifies the task of the exit of another task.
    fn send_exit_notification(&mut self, tid: Tid, ctx: i32, tag: i32) {
        let mut body = sempa_proto::body::Packer::new(sempa_proto::body::Encoding::Xdr);
        body.pack_int(tid.raw());
        self.send(&ToTask::Deliver {
            message: Message {
                src: Tid::MY_DAEMON,
                dst: Tid::from_raw(TASK_TID),
                ctx,
                tag,
                wid: 0,
                enc: sempa_proto::message::ENC_XDR,
                body: body.finish(),
            },
            deliver_after: None,
        });
    }

    fn answer_request(&mut self, request: Request) -> Reply {
        let failure_reply = |error| Reply::Failed {
            error,
            reason: String::new(),
        };
        match request {
            Request::Config => Reply::Hosts(HostTable {
                hosts: vec![HostEntry {
                    id: HostId::MASTER,
                    name: "here".into(),
                    arch: "LINUX64".into(),
                    speed: 1000,
                    dsig: DSIG_X86_64,
                    addresses: Vec::new(),
                }],
                ..HostTable::default()
            }),
            Request::Tasks { .. } => Reply::Tasks(vec![TaskInfo {
                tid: Tid::from_raw(TASK_TID),
                parent: Tid::NONE,
                host: HostId::MASTER,
                flags: 4,
                name: String::new(),
                pid: 4077,
                uid: 0,
                migrating: false,
                paused: false,
                suspended: false,
                namespace_pid: 77,
                stopping: false,
                leftover_processes: 0,
            }]),
            Request::Spawn(request_content) if request_content.program == "nowhere" => {
                Reply::Spawned(vec![
                    Err(PvmError::NoFile);
                    request_content.task_count as usize
                ])
            }
            Request::Spawn(request_content) if request_content.program == LOST_PROGRAM => {
                let output_messages = [(-2, &b""[..]), (8, &b"one\nhalf"[..])];
                self.send_child_output(request_content.output_sink, CHILD_TID, &output_messages);
                Reply::Spawned(vec![Ok(Tid::from_raw(CHILD_TID))])
            }
            Request::Notify(NotifyRequest {
                subjects: NotifySubjects::TaskExit(tids),
                ctx,
                tag,
                ..
            }) => {
                tids.into_iter()
                    .for_each(|tid| self.send_exit_notification(tid, ctx, tag));
                Reply::Done
            }
            Request::Spawn(request_content) => {
                let output_messages = [
                    (-2, &b""[..]),
                    (6, &b"one\ntw"[..]),
                    (1, &b"o"[..]),
                    (0, &b""[..]),
                    (-1, &b""[..]),
                ];
                if request_content.output_sink.tid.is_task() {
                    self.send_child_output(
                        request_content.output_sink,
                        CHILD_TID,
                        &output_messages,
                    );
                }
                let mut results =
                    vec![Err(PvmError::OutOfRes); request_content.task_count as usize];
                results[request_content.task_count as usize - 1] = Ok(Tid::from_raw(CHILD_TID));
                Reply::Spawned(results)
            }
            Request::HostStatus { name } if name == "here" => Reply::Done,
            Request::HostStatus { .. } => failure_reply(PvmError::NoHost),
            Request::TaskStatus { tid } if tid.raw() == TASK_TID => Reply::Done,
            Request::TaskStatus { .. } => failure_reply(PvmError::NoTask),
            Request::NewContext => Reply::Context(0x40001),
            Request::FreeContext { ctx: 0x40001 } => Reply::Done,
            Request::FreeContext { .. } => failure_reply(PvmError::NotFound),
            Request::HostSync { .. } => Reply::Clock(Micros::from_secs(1_000_000)),
            Request::Mailbox(request_content) => self.answer_mailbox_request(request_content),
            _ => Reply::Done,
        }
    }

    fn answer_mailbox_request(&mut self, request: MailboxRequest) -> Reply {
        let not_found_reply = Reply::Failed {
            error: PvmError::NotFound,
            reason: String::new(),
        };
        match request {
            MailboxRequest::Put {
                name,
                flags,
                message,
            } => {
                let index = (flags >> 10)..;
                let index = index
                    .into_iter()
                    .find(|i| !self.mailbox.contains_key(&(name.clone(), *i)));
                let index = index.expect("a free index");
                self.mailbox.insert((name, index), message);
                Reply::MailboxIndex(index)
            }
            MailboxRequest::Take { name, index, .. } => self
                .mailbox
                .get(&(name, index))
                .cloned()
                .map_or(not_found_reply, Reply::Mailbox),
            MailboxRequest::Delete { name, index } => self
                .mailbox
                .remove(&(name, index))
                .map_or(not_found_reply, |_| Reply::Done),
            MailboxRequest::Clean { .. } => Reply::Done,
            MailboxRequest::List { .. } => {
                let mut classes: Vec<MailboxClass> = Vec::new();
                for (name, index) in self.mailbox.keys() {
                    let entry = (*index, Tid::from_raw(TASK_TID), 3);
                    match classes.last_mut().filter(|class| class.name == *name) {
                        Some(class) => class.entries.push(entry),
                        None => classes.push(MailboxClass {
                            name: name.clone(),
                            entries: vec![entry],
                        }),
                    }
                }
                Reply::MailboxClasses(classes)
            }
        }
    }
}
