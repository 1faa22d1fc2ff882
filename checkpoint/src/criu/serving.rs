//! Hands out the memory that a dump has left with the task's processes, also when these have been killed.
//!
//! A process that is killed gives its memory back on its way out. Its tracer can have it stand still just before that, for as
//! long as the tracer likes: it will never again do anything of its own, nothing can make it, and its memory is there to
//! be read. So from the dump on the first thread of each process that keeps memory has a tracer, and before it is killed
//! that one is told to have it stay. When the last page was handed out, or nobody wants them any more, it is let go: it goes
//! on standing still if it was not killed, and is gone if it was; likewise if we end, however that comes.

use super::precopy::{BLOCK_PAGES, SentAhead};
use super::process::{hurry_thread, wait_for};
use super::ptrace::Attached;
use super::withheld::Withheld;
use super::words::{
    ADD, CHANGED, CLOSE, CLOSE_ALL_THE_SAME, FLAGS_SHIFT, Form, GET, GET_CHANGED, Head, PRESENT,
    marks_bytes,
};
use crate::criu::images::page_size;
use crate::engine::{Limits, Memory, Serving};
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

/// Bytes that are read of a process, and written, at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Questions that are read at once, in bytes.
const QUESTIONS_BYTES: usize = 4 << 10;
/// Orders that wait for the tracer; each is waited for.
const ORDERS_MAX: usize = 4;

/// An order to the tracer.
#[derive(Debug)]
pub(crate) enum Order {
    /// Processes that are killed from now on stay. The answer says that it is so.
    Stay(SyncSender<()>),
    /// Let go of them.
    End,
}

/// The memory of a dumped task that waits to be asked for.
pub(super) struct Serve {
    memory: Memory,
    tracer: Option<JoinHandle<()>>,
    handing: Option<JoinHandle<Result<(), Failure>>>,
    /// Readable when nothing is handed out any more.
    over: Arc<EventFd>,
}

impl Serve {
    /// Takes hold of the processes, and hands out what they keep to whoever asks on this stream, who may have got a part of it
    /// before.
    ///
    /// # Errors
    /// One of them cannot be traced, or there is no thread. They stand still as before.
    pub(super) fn start(
        withheld: Withheld,
        asked_on: Arc<OwnedFd>,
        sent: Option<Arc<SentAhead>>,
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
        let memory = Memory {
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
                // The other end is told also when it has asked for what is not there. Only a full counter can fail.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                let _ = over.write(1);
                done
            });
        serve.handing = Some(handing.map_err(|e| io("no thread", e))?);
        Ok(serve)
    }

    /// Nothing is handed out any more, and the processes are let go, when this returns.
    fn end(&mut self) -> Result<(), Failure> {
        self.memory.withhold();
        let broken = || Failure::Engine("the thread that hands memory out has panicked".into());
        let handed = self.handing.take().map_or(Ok(()), |handing| {
            handing.join().unwrap_or_else(|_| Err(broken()))
        });
        if let Some(tracer) = self.tracer.take() {
            // It may have ended by itself: without the processes.
            let _ = self.memory.orders.send(Order::End);
            tracer.join().expect("the tracer does not panic");
        }
        handed
    }
}

impl Serving for Serve {
    fn memory(&self) -> Memory {
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
        // After a regular end nothing is left to do, and otherwise nobody waits for more.
        let _ = self.end();
    }
}

/// Holds these processes until it is told to let go. `begun` hears whether that can be done.
fn trace(pids: &[i32], begun: &SyncSender<io::Result<()>>, orders: &Receiver<Order>) {
    let attached: io::Result<Vec<Attached>> = pids.iter().map(|pid| Attached::to(*pid)).collect();
    let attached = match attached {
        Ok(attached) => attached,
        Err(e) => return drop(begun.send(Err(e))),
    };
    if begun.send(Ok(())).is_err() {
        return;
    }
    while let Ok(Order::Stay(answer)) = orders.recv() {
        // One that has ended meanwhile has nothing to keep, which whoever asks for it learns.
        attached
            .iter()
            .for_each(|process| drop(process.stay_at_its_end()));
        let _ = answer.send(());
    }
}

/// Answers until the other end has what it wants, or has closed its stream.
fn hand_out(
    mut stream: &UnixStream,
    withheld: &Withheld,
    sent: Option<&SentAhead>,
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
            // It was shut down; likewise below.
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

/// The other end does not listen any more.
fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// Answers one question whole.
fn answer(
    mut stream: &UnixStream,
    withheld: &Withheld,
    form: Form,
    asked: &Head,
    room: &mut Vec<u8>,
) -> io::Result<()> {
    let end = end_of(asked)?;
    let mut at = asked.address;
    // The head and the first piece go together.
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

/// Answers one question with what is not any more what was sent ahead.
fn answer_changed(
    mut stream: &UnixStream,
    (withheld, sent): (&Withheld, &SentAhead),
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

/// Who keeps this address, and until where.
fn missing_at(withheld: &Withheld, process: u64, at: u64) -> io::Result<(i32, u64)> {
    let not_missing = || io::Error::other(format!("nothing is missing at {at:#x}"));
    withheld.stretch(process, at).ok_or_else(not_missing)
}

/// Reads all of this of a process, also what it must not read itself.
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
    use super::super::precopy::{Hurry, send, take};
    use super::super::withheld::Withheld;
    use super::*;
    use crate::engine::Cancel;
    use nix::sys::signal::{Signal, kill};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// Time for anything that is waited for.
    const SOON: Duration = Duration::from_secs(60);

    /// A process with memory of its own that says where it is, and is stopped.
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

    #[test]
    #[ignore = "system tier: needs python3"]
    fn memory_of_a_process_that_was_killed_is_handed_out_and_gone_with_the_last_page() {
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
        // Twice: who is on its way out does not hear of more.
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

    #[test]
    #[ignore = "system tier: needs python3"]
    fn of_memory_that_was_sent_ahead_only_what_has_changed_is_handed_out() {
        let (mut child, address) = holder();
        let pid = child.id() as i32;
        let first = address.next_multiple_of(page_size());
        let (stream, asked_on) = pair();
        let sent = std::thread::scope(|scope| {
            let target = asked_on.clone();
            let taking = scope.spawn({
                let stream = OwnedFd::from(stream.try_clone().expect("a descriptor"));
                move || {
                    take(&stream, u64::MAX).inspect(|store| {
                        store.acknowledge(&stream).expect("it listens");
                    })
                }
            });
            let sent =
                send(&[pid], &target, &Hurry::at(Instant::now() + SOON)).expect("it is taken");
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

    #[test]
    #[ignore = "system tier: needs python3"]
    fn a_process_whose_memory_nobody_wants_stands_still_as_before() {
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

    #[test]
    #[ignore = "system tier: needs python3"]
    fn who_asks_for_what_is_not_missing_gets_nothing_and_is_told() {
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

    #[test]
    fn a_transfer_that_is_called_off_ends() {
        let (_stream, asked_on) = pair();
        let serve =
            Serve::start(Withheld::default(), asked_on, None).expect("nothing is to be traced");
        let cancel = Cancel::new().expect("a descriptor");
        cancel.fire();
        let done = Box::new(serve).finish(&Limits {
            allowed: SOON,
            cancel,
        });
        assert!(matches!(done, Err(Failure::CalledOff(_))), "{done:?}");
    }
}
