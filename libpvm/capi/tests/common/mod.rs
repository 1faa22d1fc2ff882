//! Helpers of the tests: the library as built, C programs linked with it, and a fake daemon that
//! serves one task.

#![allow(dead_code)] // Each test file uses its part.

pub(crate) mod vm;

use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::table::{HostEntry, HostTable, TaskInfo};
use sempa_proto::task::{
    Claim, MailboxClass, MailboxRequest, Reply, Request, Sink, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{HostId, Message, Micros, PvmError, Tid};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Returns the path of the library that the test run has built.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folders = test.ancestors().skip(1).take(2);
    let found = folders
        .map(|folder| folder.join("libpvm3.so"))
        .find(|path| path.is_file());
    found.expect("cargo builds the library before its tests")
}

/// Returns the folder of the headers in the source tree.
pub(crate) fn include() -> PathBuf {
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
    let done = command.output().expect("a C compiler");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Compiles a C program with the headers of a folder and links it with a library.
pub(crate) fn link(source: &Path, header: &Path, options: &[&str], library: &Path, program: &Path) {
    let mut command = c_compiler();
    run_compiler(
        command
            .arg("-std=gnu11")
            .args(options)
            .arg("-I")
            .arg(header)
            .arg(source)
            .arg("-o")
            .arg(program)
            .arg(library),
    );
}

/// Returns the source of a program in `tests/c`.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(format!("{name}.c"))
}

/// Folder that contains a C program, and the library under the name that programs load.
pub(crate) struct Program {
    dir: TempDir,
    path: PathBuf,
}

impl Program {
    /// Compiles `tests/c/<name>.c` with this header and links it with the library.
    pub(crate) fn compile(name: &str, header: &Path) -> Program {
        Program::compile_with(
            name,
            header,
            &["-Wall", "-Werror", "-Wno-stringop-overread"],
        )
    }

    /// As [`Program::compile`], with these options about warnings.
    pub(crate) fn compile_with(name: &str, header: &Path, warnings: &[&str]) -> Program {
        Program::build(name, header, warnings, |_| source(name))
    }

    /// Compiles this source text with the header of this project.
    pub(crate) fn of_text(name: &str, text: &str, warnings: &[&str]) -> Program {
        Program::build(name, &include(), warnings, |folder| {
            let source = folder.join(format!("{name}.c"));
            std::fs::write(&source, text).expect("writable");
            source
        })
    }

    fn build(
        name: &str,
        header: &Path,
        warnings: &[&str],
        source: impl FnOnce(&Path) -> PathBuf,
    ) -> Program {
        let dir = TempDir::new().expect("a directory");
        let linked = dir.path().join("libpvm3.so.3");
        std::os::unix::fs::symlink(library(), &linked).expect("a link");
        let path = dir.path().join(name);
        link(&source(dir.path()), header, warnings, &linked, &path);
        Program { dir, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a command for the program, which finds its daemon in `tmp`.
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
pub(crate) fn must_succeed(done: &Output) {
    let (out, err) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    assert!(
        done.status.success(),
        "{}\n--- stdout\n{out}\n--- stderr\n{err}",
        done.status
    );
}

/// Tid of the task that the fake daemon serves.
pub(crate) const TASK_TID: i32 = 0x40001;
/// Tid of each task that the fake daemon reports as started.
pub(crate) const CHILD_TID: i32 = 0x40002;

/// Fake daemon for one task at a time: it welcomes the task and answers simple requests.
pub(crate) struct FakeDaemon {
    tmp: TempDir,
}

impl FakeDaemon {
    /// Listens on the socket that a program uses if its `PVM_TMP` is [`Daemon::tmp`].
    pub(crate) fn start() -> FakeDaemon {
        FakeDaemon::with_parent(Tid::NONE)
    }

    /// As [`Daemon::start`]; the welcome names this parent.
    pub(crate) fn with_parent(parent: Tid) -> FakeDaemon {
        let tmp = TempDir::new().expect("a directory");
        let root = tmp.path().to_string_lossy().into_owned();
        let place = sempa_proto::runtime_paths::RuntimePaths::from_env(user_id(), |name| {
            (name == "PVM_TMP").then(|| root.clone())
        });
        let place = place.expect("a good place");
        std::fs::create_dir_all(place.dir()).expect("the directory of the virtual machine");
        let listener = UnixListener::bind(place.daemon_socket()).expect("a socket");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    TaskConn {
                        stream,
                        parent,
                        mailbox: BTreeMap::new(),
                    }
                    .serve()
                });
            }
        });
        FakeDaemon { tmp }
    }

    /// Returns the value of `PVM_TMP` for programs that must connect to this daemon.
    pub(crate) fn tmp(&self) -> &Path {
        self.tmp.path()
    }
}

fn user_id() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").expect("this process").uid()
}

struct TaskConn {
    stream: UnixStream,
    parent: Tid,
    mailbox: BTreeMap<(String, i32), Message>,
}

impl TaskConn {
    fn send(&mut self, what: &ToTask) {
        // A program that has ended reads nothing.
        let _ = self.stream.write_all(&encode_control(what).expect("small"));
    }

    fn serve(mut self) {
        let mut decoder = FrameDecoder::new();
        let mut chunk = [0; 4096];
        loop {
            while let Some(frame) = decoder.next_frame().expect("the library writes frames") {
                match frame.decode_control::<ToDaemon>() {
                    Ok(ToDaemon::Hello(hello)) => self.welcome(hello.claim),
                    Ok(ToDaemon::Request { id, request: what }) => {
                        let reply = self.answer(what);
                        self.send(&ToTask::Reply { id, reply });
                    }
                    _ => (),
                }
            }
            match self.stream.read(&mut chunk) {
                Ok(0) | Err(_) => return,
                Ok(n) => decoder.push(&chunk[..n]),
            }
        }
    }

    fn welcome(&mut self, claim: Claim) {
        self.send(&ToTask::Welcome(Welcome {
            tid: Tid::from_raw(TASK_TID),
            parent: self.parent,
            host: HostId::MASTER,
            addresses: vec![],
            rm: None,
            output: Sink::default(),
            trace: Sink::default(),
            dsig: DSIG_X86_64,
            spawned: matches!(claim, Claim::Spawned { .. }),
            tracer: None,
            restart: None,
            handoff: None,
        }));
        if self.parent.is_task() {
            self.send_siblings();
        }
    }

    /// Sends the list of siblings, as the library of the parent does.
    fn send_siblings(&mut self) {
        let mut body = sempa_proto::body::Packer::new(sempa_proto::body::Encoding::Xdr);
        body.int(2).int(TASK_TID).int(CHILD_TID);
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

    /// Sends the output of the spawned tasks, as a daemon does.
    fn send_child_output(&mut self, sink: Sink, tid: i32, words: &[(i32, &[u8])]) {
        for (mark, text) in words {
            let mut body = sempa_proto::body::Packer::new(sempa_proto::body::Encoding::Xdr);
            body.int(tid).int(*mark);
            if *mark > 0 {
                body.bytes(text);
            } else if *mark < 0 {
                body.int(TASK_TID);
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

    fn answer(&mut self, request: Request) -> Reply {
        let failed = |error| Reply::Failed {
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
                pid: 77,
                uid: 0,
                migrating: false,
                paused: false,
                suspended: false,
            }]),
            Request::Spawn(what) if what.file == "nowhere" => {
                Reply::Spawned(vec![Err(PvmError::NoFile); what.count as usize])
            }
            Request::Spawn(what) => {
                let printed = [
                    (-2, &b""[..]),
                    (6, &b"one\ntw"[..]),
                    (1, &b"o"[..]),
                    (0, &b""[..]),
                    (-1, &b""[..]),
                ];
                if what.output.tid.is_task() {
                    self.send_child_output(what.output, CHILD_TID, &printed);
                }
                let mut results = vec![Err(PvmError::OutOfRes); what.count as usize];
                results[what.count as usize - 1] = Ok(Tid::from_raw(CHILD_TID));
                Reply::Spawned(results)
            }
            Request::HostStatus { name } if name == "here" => Reply::Done,
            Request::HostStatus { .. } => failed(PvmError::NoHost),
            Request::TaskStatus { tid } if tid.raw() == TASK_TID => Reply::Done,
            Request::TaskStatus { .. } => failed(PvmError::NoTask),
            Request::NewContext => Reply::Context(0x40001),
            Request::FreeContext { ctx: 0x40001 } => Reply::Done,
            Request::FreeContext { .. } => failed(PvmError::NotFound),
            Request::HostSync { .. } => Reply::Clock(Micros::from_secs(1_000_000)),
            Request::Mailbox(what) => self.mailbox(what),
            _ => Reply::Done,
        }
    }

    fn mailbox(&mut self, request: MailboxRequest) -> Reply {
        let not_found = Reply::Failed {
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
                .map_or(not_found, Reply::Mailbox),
            MailboxRequest::Delete { name, index } => self
                .mailbox
                .remove(&(name, index))
                .map_or(not_found, |_| Reply::Done),
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
