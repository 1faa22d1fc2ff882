//! Serves the memory that a dump has left in the task's processes, even after they have been
//! killed.
//!
//! The kernel frees the memory of a killed process when the process exits. A tracer can stop the
//! process just before, at PTRACE_EVENT_EXIT. There it executes nothing, only its tracer can make
//! it continue, and its memory is still readable. Therefore:
//!
//! 1. From the dump on, a thread of ours traces the first thread of each process that has served
//!    memory.
//! 2. Before the processes are killed the tracer sets PTRACE_O_TRACEEXIT
//!    ([`TracerOrder::KeepKilled`]).
//! 3. When the last page was served, or no page is needed any more, the tracer detaches. A killed
//!    process then exits; any other process remains stopped. The kernel does the same if this
//!    program ends for any reason.

use super::process::{hurry_thread, wait_for};
use super::ptrace::Attached;
use super::withheld::Withheld;
use super::words::{
    ADD, CHANGED, CLOSE, CLOSE_ALL_THE_SAME, FLAGS_SHIFT, Form, GET, GET_CHANGED, Head, PRESENT,
    marks_bytes,
};
use crate::engine::pages::{BLOCK_PAGES, page_size};
use crate::engine::{Limits, SentPages, ServedMemory, Serving, TracerOrder};
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Maximum number of bytes that are read from a process and written to the stream at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Maximum number of bytes of requests that are read at once.
const QUESTIONS_BYTES: usize = 4 << 10;
/// Capacity of the queue of orders to the tracer. Senders wait for each order to be carried out.
const ORDERS_MAX: usize = 4;

/// A page server for the memory of a dumped task.
pub(super) struct Serve {
    memory: ServedMemory,
    tracer: Option<JoinHandle<()>>,
    handing: Option<JoinHandle<Result<(), Failure>>>,
    /// Readable when serving has ended.
    over: Arc<EventFd>,
}

impl Serve {
    /// Attaches to the processes and starts to serve their memory on the stream `asked_on`. `sent`
    /// records the pages that the target already has.
    ///
    /// # Errors
    /// A process cannot be traced, or no thread is available. The processes remain stopped.
    pub(super) fn start(
        withheld: Withheld,
        asked_on: Arc<OwnedFd>,
        sent: Option<Arc<SentPages>>,
    ) -> Result<Serve, Failure> {
        let io = |what: &str, e: io::Error| {
            Failure::Engine(format!("its memory cannot be handed out: {what}: {e}"))
        };
        let pids: Vec<i32> = withheld.processes.iter().map(|kept| kept.pid).collect();
        let (orders, to_tracer) = sync_channel(ORDERS_MAX);
        let (begun, begins) = sync_channel(1);
        let tracer = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || trace(&pids, &begun, &to_tracer))
            .map_err(|e| io("no thread", e))?;
        let memory = ServedMemory {
            asked_on: asked_on.clone(),
            orders,
        };
        let over = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let over = Arc::new(over.map_err(|e| io("no descriptor", e.into()))?);
        let mut serve = Serve {
            memory,
            tracer: Some(tracer),
            handing: None,
            over,
        };
        let traced = begins.recv().unwrap_or_else(|_| Err(Errno::ESRCH.into()));
        traced.map_err(|e| io("a process cannot be traced", e))?;
        let stream = asked_on
            .try_clone()
            .map(UnixStream::from)
            .map_err(|e| io("no descriptor", e))?;
        let over = serve.over.clone();
        let handing = std::thread::Builder::new()
            .name("handing".into())
            .spawn(move || {
                hurry_thread();
                let done = hand_out(&stream, &withheld, sent.as_deref());
                // The shutdown also notifies a target that requested a page that is not served. The
                // write fails only if the counter is full.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                let _ = over.write(1);
                done
            });
        serve.handing = Some(handing.map_err(|e| io("no thread", e))?);
        Ok(serve)
    }

    /// Stops serving and detaches from the processes. Returns the result of serving.
    fn end(&mut self) -> Result<(), Failure> {
        self.memory.withhold();
        let broken = || Failure::Engine("the thread that hands memory out has panicked".into());
        let handed = self.handing.take().map_or(Ok(()), |handing| {
            handing.join().unwrap_or_else(|_| Err(broken()))
        });
        if let Some(tracer) = self.tracer.take() {
            // The tracer has already ended if it could not attach.
            let _ = self.memory.orders.send(TracerOrder::Detach);
            tracer.join().expect("the tracer does not panic");
        }
        handed
    }
}

impl Serving for Serve {
    fn memory(&self) -> ServedMemory {
        self.memory.clone()
    }

    fn finish(mut self: Box<Self>, limits: &Limits) -> Result<(), Failure> {
        let waited = wait_for(&*self.over, limits, "its memory to be handed out");
        let handed = self.end();
        waited.and(handed)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // After `finish` this does nothing. Otherwise no one waits for the result.
        let _ = self.end();
    }
}

/// Traces these processes until it is ordered to detach. Sends to `begun` whether they could be
/// attached.
fn trace(pids: &[i32], begun: &SyncSender<io::Result<()>>, orders: &Receiver<TracerOrder>) {
    let attached: io::Result<Vec<Attached>> = pids.iter().map(|pid| Attached::to(*pid)).collect();
    let attached = match attached {
        Ok(attached) => attached,
        Err(e) => return drop(begun.send(Err(e))),
    };
    if begun.send(Ok(())).is_err() {
        return;
    }
    while let Ok(TracerOrder::KeepKilled(answer)) = orders.recv() {
        // Fails for a process that has exited meanwhile. It has no memory left; a request for its
        // pages will fail.
        attached
            .iter()
            .for_each(|process| drop(process.stay_at_its_end()));
        let _ = answer.send(());
    }
}

/// Answers requests until the target reports the end or closes the stream.
fn hand_out(
    mut stream: &UnixStream,
    withheld: &Withheld,
    sent: Option<&SentPages>,
) -> Result<(), Failure> {
    let failed =
        |what: &str| Failure::Engine(format!("its memory is not handed out any more: {what}"));
    let (mut heard, mut form, mut room) = (Vec::new(), None, Vec::new());
    let mut bytes = [0; QUESTIONS_BYTES];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(length) => heard.extend_from_slice(&bytes[..length]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The stream was shut down. A write fails for the same reason.
            Err(_) => return Ok(()),
        }
        while let Some(command) = heard
            .first_chunk()
            .map(|command| u32::from_ne_bytes(*command))
        {
            if matches!(command, CLOSE | CLOSE_ALL_THE_SAME) {
                let _ = stream.write_all(&0_i32.to_ne_bytes());
                return Ok(());
            }
            form = form.or_else(|| {
                Form::of_question(&heard, |number, address| withheld.has(number, address))
            });
            let Some(known) = form else {
                match heard.len() < Form::BYTES_MAX {
                    true => break,
                    false => return Err(failed("it was asked for what is not missing")),
                }
            };
            if heard.len() < known.bytes() {
                break;
            }
            let head = known.read(&heard);
            heard.drain(..known.bytes());
            let answered = match (head.command, sent) {
                (GET, _) if head.pages > 0 => answer(stream, withheld, known, &head, &mut room),
                (GET_CHANGED, Some(sent)) if (1..=BLOCK_PAGES).contains(&head.pages) => {
                    answer_changed(stream, (withheld, sent), known, &head, &mut room)
                }
                _ => {
                    return Err(failed(&format!(
                        "it was told something that it does not understand: {head:?}"
                    )));
                }
            };
            match answered {
                Ok(()) => {}
                Err(e) if is_closed(&e) => return Ok(()),
                Err(e) => return Err(failed(&format!("{head:?}: {e}"))),
            }
        }
    }
}

/// True if the target has closed the stream.
fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// Sends all requested pages.
fn answer(
    mut stream: &UnixStream,
    withheld: &Withheld,
    form: Form,
    asked: &Head,
    room: &mut Vec<u8>,
) -> io::Result<()> {
    let end = end_of(asked)?;
    let mut at = asked.address;
    // The header and the first piece are sent by one write.
    room.clear();
    room.extend(form.write(&Head {
        command: PRESENT << FLAGS_SHIFT | ADD,
        ..*asked
    }));
    while at < end {
        let (pid, until) = missing_at(withheld, asked.process, at)?;
        let piece = (until.min(end) - at).min(PIECE_BYTES);
        let begin = room.len();
        room.resize(begin + piece as usize, 0);
        read_memory(pid, at, &mut room[begin..])?;
        stream.write_all(room)?;
        room.clear();
        at += piece;
    }
    Ok(())
}

/// Sends those of the requested pages whose content has changed since the pre-copy.
fn answer_changed(
    mut stream: &UnixStream,
    (withheld, sent): (&Withheld, &SentPages),
    form: Form,
    asked: &Head,
    room: &mut Vec<u8>,
) -> io::Result<()> {
    let (end, page) = (end_of(asked)?, page_size() as usize);
    let mut at = asked.address;
    room.resize((end - at) as usize, 0);
    while at < end {
        let (pid, until) = missing_at(withheld, asked.process, at)?;
        let until = until.min(end);
        read_memory(
            pid,
            at,
            &mut room[(at - asked.address) as usize..(until - asked.address) as usize],
        )?;
        at = until;
    }
    let mut words = form.write(&Head {
        command: CHANGED,
        ..*asked
    });
    let marks = words.len();
    words.resize(marks + marks_bytes(asked.pages), 0);
    for (number, content) in room.chunks(page).enumerate() {
        if !sent.has(
            asked.process,
            asked.address + (number * page) as u64,
            content,
        ) {
            words[marks + number / 8] |= 1 << (number % 8);
            words.extend_from_slice(content);
        }
    }
    stream.write_all(&words)
}

fn end_of(asked: &Head) -> io::Result<u64> {
    let length = asked
        .pages
        .checked_mul(page_size())
        .ok_or(io::ErrorKind::InvalidInput)?;
    asked
        .address
        .checked_add(length)
        .ok_or(io::ErrorKind::InvalidInput.into())
}

/// Returns the PID of the process that has the page at this address, and the end of the range of
/// served pages.
fn missing_at(withheld: &Withheld, process: u64, at: u64) -> io::Result<(i32, u64)> {
    let not_missing = || io::Error::other(format!("nothing is missing at {at:#x}"));
    withheld.stretch(process, at).ok_or_else(not_missing)
}

/// Reads all of this memory, including areas without read permission.
fn read_memory(pid: i32, address: u64, into: &mut [u8]) -> io::Result<()> {
    match read_readable(pid, address, into) {
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => {
            File::open(format!("/proc/{pid}/mem"))?.read_exact_at(into, address)
        }
        read => read,
    }
}

fn read_readable(pid: i32, address: u64, into: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        let from = [RemoteIoVec {
            base: address as usize + done,
            len: into.len() - done,
        }];
        match process_vm_readv(
            Pid::from_raw(pid),
            &mut [IoSliceMut::new(&mut into[done..])],
            &from,
        ) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::precopy::{acknowledge, receive, send};
    use super::*;
    use crate::engine::{Cancel, PreCopyStop};
    use nix::sys::signal::{Signal, kill};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// Timeout for anything that a test waits for.
    const SOON: Duration = Duration::from_secs(60);

    /// Starts a process with a known pattern in its memory and stops it. Returns it with the
    /// pattern's address.
    fn holder() -> (Child, u64) {
        let code = "import ctypes, time\nheld = ctypes.create_string_buffer(bytes(range(256)) * 16384)\n\
                    print(ctypes.addressof(held), flush=True)\ntime.sleep(1000)";
        let mut child = Command::new("python3")
            .args(["-c", code])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut line = String::new();
        let out = child.stdout.as_mut().expect("a pipe");
        io::BufRead::read_line(&mut io::BufReader::new(out), &mut line).expect("it says where");
        kill(Pid::from_raw(child.id() as i32), Signal::SIGSTOP).expect("it is there");
        (child, line.trim().parse().expect("a number"))
    }

    fn pair() -> (UnixStream, Arc<OwnedFd>) {
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        ours.set_read_timeout(Some(SOON)).expect("a socket");
        (ours, Arc::new(theirs.into()))
    }

    fn ask(mut stream: &UnixStream, process: u64, address: u64, pages: u64) -> Option<Vec<u8>> {
        let question = Form::Long.write(&Head {
            command: GET,
            pages,
            address,
            process,
        });
        stream.write_all(&question).ok()?;
        let mut answer = vec![0; question.len() + (pages * page_size()) as usize];
        stream.read_exact(&mut answer).ok()?;
        let head = Form::Long.read(&answer);
        assert_eq!(
            head,
            Head {
                command: PRESENT << FLAGS_SHIFT | ADD,
                pages,
                address,
                process
            }
        );
        Some(answer.split_off(question.len()))
    }

    fn state(pid: u32) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat[stat.rfind(')')? + 2..].chars().next()
    }

    fn wait_for(what: &str, look: impl Fn() -> bool) {
        let until = Instant::now() + SOON;
        while !look() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    }

    /// The memory of a killed process is served until the target has everything; then the process
    /// exits.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn memory_of_killed_process_is_served() {
        let (mut child, address) = holder();
        let pid = child.id();
        let withheld = Withheld::of(&[pid as i32]).expect("it is there");
        let number = withheld.processes[0].number;
        let first = (address + page_size() - 1) & !(page_size() - 1);
        let (stream, asked_on) = pair();
        let serve = Serve::start(withheld, asked_on, None).expect("it can be traced");
        let skipped = (first - address) as usize;
        let expected: Vec<u8> = (0..=255_u8)
            .cycle()
            .skip(skipped % 256)
            .take(3 * page_size() as usize)
            .collect();
        assert_eq!(
            ask(&stream, number, first, 3).as_deref(),
            Some(&expected[..]),
            "while it stands still"
        );
        serve.memory().outlive();
        // Twice, because a second signal must not release a process at its exit stop.
        for _ in 0..2 {
            child.kill().expect("it is there");
            wait_for("it stays", || state(pid) == Some('t'));
        }
        assert_eq!(
            ask(&stream, number, first, 3).as_deref(),
            Some(&expected[..]),
            "when it was killed"
        );
        drop(stream);
        let limits = Limits {
            allowed: SOON,
            cancel: Cancel::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(serve).finish(&limits), Ok(()));
        assert!(!child.wait().expect("it ends").success());
    }

    /// After a pre-copy, only pages that have changed since are sent.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn only_pages_changed_since_pre_copy_are_sent() {
        let (mut child, address) = holder();
        let pid = child.id() as i32;
        let first = address.next_multiple_of(page_size());
        let (stream, asked_on) = pair();
        let sent = std::thread::scope(|scope| {
            let target = asked_on.clone();
            let taking = scope.spawn({
                let stream = OwnedFd::from(stream.try_clone().expect("a descriptor"));
                move || {
                    receive(&stream, u64::MAX).inspect(|store| {
                        acknowledge(store, &stream).expect("it listens");
                    })
                }
            });
            let sent = send(&[pid], &target, &PreCopyStop::at(Instant::now() + SOON))
                .expect("it is taken");
            taking.join().expect("no panic").expect("all comes");
            sent
        });
        let memory = File::options()
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .expect("it is there");
        memory
            .write_all_at(b"new", first + 9 * page_size() + 5)
            .expect("it is stopped");
        let withheld = Withheld::of(&[pid]).expect("it is there");
        let number = withheld.processes[0].number;
        let serve =
            Serve::start(withheld, asked_on, Some(Arc::new(sent))).expect("it can be traced");
        let question = Form::Long.write(&Head {
            command: GET_CHANGED,
            pages: 12,
            address: first,
            process: number,
        });
        (&stream).write_all(&question).expect("it listens");
        let mut answer = vec![0; question.len() + marks_bytes(12) + page_size() as usize];
        (&stream).read_exact(&mut answer).expect("it answers");
        assert_eq!(
            Form::Long.read(&answer),
            Head {
                command: CHANGED,
                pages: 12,
                address: first,
                process: number
            }
        );
        assert_eq!(answer[question.len()..][..2], [0, 0b10]);
        assert_eq!(answer[question.len() + 2..][5..8], *b"new");
        assert_eq!(
            ask(&stream, number, first + page_size(), 2).map(|pages| pages.len() as u64),
            Some(2 * page_size())
        );
        drop(stream);
        let limits = Limits {
            allowed: SOON,
            cancel: Cancel::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(serve).finish(&limits), Ok(()));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A process whose memory is not served any more remains stopped and can be continued.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn process_without_server_remains_stopped() {
        let (mut child, _) = holder();
        let pid = child.id();
        let (stream, asked_on) = pair();
        let serve = Serve::start(
            Withheld::of(&[pid as i32]).expect("it is there"),
            asked_on,
            None,
        )
        .expect("traced");
        serve.memory().withhold();
        let limits = Limits {
            allowed: SOON,
            cancel: Cancel::new().expect("a descriptor"),
        };
        assert_eq!(Box::new(serve).finish(&limits), Ok(()));
        wait_for("it is stopped", || state(pid) == Some('T'));
        assert_eq!(ask(&stream, 1, 4096, 1), None);
        kill(Pid::from_raw(pid as i32), Signal::SIGCONT).expect("it is there");
        wait_for("it goes on", || matches!(state(pid), Some('S' | 'R')));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A request for pages that are not served is an error and gets no reply.
    #[test]
    #[ignore = "system tier: needs python3"]
    fn request_for_other_pages_is_an_error() {
        let (mut child, address) = holder();
        let withheld = Withheld::of(&[child.id() as i32]).expect("it is there");
        let (number, page) = (withheld.processes[0].number, address & !(page_size() - 1));
        for (process, address, pages) in [
            (number + 1, page, 1),
            (number, page + (1 << 40), 1),
            (number, page, u64::MAX / 4096),
        ] {
            let (stream, asked_on) = pair();
            let serve = Serve::start(withheld.clone(), asked_on, None).expect("it can be traced");
            let question = Form::Long.write(&Head {
                command: GET,
                pages,
                address,
                process,
            });
            (&stream).write_all(&question).expect("it listens");
            let limits = Limits {
                allowed: SOON,
                cancel: Cancel::new().expect("a descriptor"),
            };
            let why = Box::new(serve)
                .finish(&limits)
                .expect_err("it was asked for nonsense")
                .to_string();
            assert!(
                why.contains("its memory is not handed out any more"),
                "{why}"
            );
        }
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }

    /// A page server ends when it is canceled.
    #[test]
    fn canceled_server_ends() {
        let (_stream, asked_on) = pair();
        let serve =
            Serve::start(Withheld::default(), asked_on, None).expect("nothing is to be traced");
        let cancel = Cancel::new().expect("a descriptor");
        cancel.fire();
        let done = Box::new(serve).finish(&Limits {
            allowed: SOON,
            cancel,
        });
        assert!(matches!(done, Err(Failure::Cancelled(_))), "{done:?}");
    }
}
