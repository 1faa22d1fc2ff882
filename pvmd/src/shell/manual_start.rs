//! Manual start of a daemon (`so=ms`), as in PVM: the master prints the command to type on the
//! other host and reads the new daemon's reply from its standard input.
//!
//! The certificate is delivered as with a hoster ([`super::sealed_bootstrap`]): the person enters a
//! one-time secret on the other host and types the new daemon's reply at the master's terminal. The
//! new daemon calls [`read_secret`].

use super::bootstrap::{BOOTSTRAP_BYTES_MAX, ReadyReply, Refusal, parse_reply};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, read, tcgetpgrp};
use pvmd_machine::io::HosterOrder;
use sempa_proto::PvmError;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write, stderr, stdin};
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// Time limit for a person to log in on the other host, start the daemon and type its reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(600);
/// Interval at which standard input is polled for a reply. Blocking is not possible: the master
/// must not read while it is in the background of its terminal, which is not signaled, and a
/// blocked read would delay the daemon's end.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of bytes of a typed reply.
const REPLY_BYTES_MAX: usize = 4096;

fn cannot_start(text: String) -> Refusal {
    Refusal {
        error: PvmError::CantStart,
        text,
    }
}

/// Checks that a person can be asked at the master's terminal.
///
/// # Errors
/// The reason why no person can be asked, and a remedy.
pub(crate) fn check_can_ask() -> Result<(), Refusal> {
    let why = if stdin().is_terminal() {
        if may_read_terminal() {
            return Ok(());
        }
        "it runs in the background of its terminal"
    } else {
        let kind = fstat(stdin()).map_or(SFlag::empty(), |stat| {
            SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
        });
        if [SFlag::S_IFIFO, SFlag::S_IFSOCK].contains(&kind) {
            return Ok(());
        }
        "its standard input is no terminal"
    };
    Err(cannot_start(format!(
        "so=ms starts it by hand, and the master can ask nobody for that: {why}; start the master with \
         \"pvmd hostfile\" in a terminal and leave it in front, or leave so=ms out to use ssh"
    )))
}

/// False if reading from the terminal would stop this process.
fn may_read_terminal() -> bool {
    // A terminal that is not the controlling one can always be read.
    tcgetpgrp(stdin()).map_or(true, |front| front == getpgrp())
}

/// Asks a person for one start and waits for the reply. Only one call at a time is permitted,
/// because there is one terminal.
///
/// # Errors
/// The daemon's refusal, or that no reply was typed.
pub(crate) async fn ask(order: &HosterOrder) -> Result<ReadyReply, Refusal> {
    // Input typed before the question is not a reply to it.
    while let Some(bytes) = read_available()? {
        drop(bytes);
    }
    let HosterOrder {
        login,
        command,
        secret,
    } = order;
    print(format!(
        "*** Manual startup ***\nLogin to \"{login}\" and type:\n{command}\n\
         It asks for a secret, which is good for this once:\n{secret}\nType response: "
    ))
    .await;
    let mut notice = WithdrawalNotice {
        login,
        is_pending: true,
    };
    let answer = timeout(REPLY_TIMEOUT, read_reply_line()).await;
    notice.is_pending = false;
    let result = match answer {
        Ok(Ok(line)) => parse_reply(&line).unwrap_or_else(|| {
            Err(cannot_start(format!(
                "{line:?} is not the line that a daemon answers with, which begins with ddpro<"
            )))
        }),
        Ok(Err(refusal)) => Err(refusal),
        Err(_) => Err(cannot_start(format!(
            "nobody typed an answer within {} s",
            REPLY_TIMEOUT.as_secs()
        ))),
    };
    print(match &result {
        Ok(_) => "Thanks\n".to_string(),
        Err(refusal) => format!("{login} is not added: {}\n", refusal.text),
    })
    .await;
    result
}

/// When dropped, notifies the person if the question is withdrawn, for example by a halt.
struct WithdrawalNotice<'a> {
    login: &'a str,
    is_pending: bool,
}

impl Drop for WithdrawalNotice<'_> {
    fn drop(&mut self) {
        if self.is_pending {
            print_in_thread(format!("\n{} is not wanted any more\n", self.login), None);
        }
    }
}

/// Prints to standard error and waits until that is done.
async fn print(text: String) {
    let (done, printed) = oneshot::channel();
    print_in_thread(text, Some(done));
    let _ = printed.await;
}

/// Prints from a separate thread: a stopped terminal must not stop the daemon.
fn print_in_thread(text: String, done: Option<oneshot::Sender<()>>) {
    std::thread::spawn(move || {
        // If the terminal is gone, the reply will time out.
        let _ = stderr().write_all(text.as_bytes());
        done.map(|done| done.send(()))
    });
}

/// Returns the next line that is not blank.
async fn read_reply_line() -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    loop {
        while let Some(more) = read_available()? {
            bytes.extend(more);
            while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = bytes.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line).trim().to_string();
                if !line.is_empty() {
                    return Ok(line);
                }
            }
            if bytes.len() > REPLY_BYTES_MAX {
                return Err(cannot_start(format!(
                    "the answer is longer than {REPLY_BYTES_MAX} bytes"
                )));
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns the bytes that can be read without waiting; `None` if there are none.
fn read_available() -> Result<Option<Vec<u8>>, Refusal> {
    let stdin = stdin();
    let ended = |why: &str| {
        cannot_start(format!(
            "the master's standard input has ended ({why}), so that nobody can answer"
        ))
    };
    let mut ends = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    let waits = poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    if !waits || stdin.is_terminal() && !may_read_terminal() {
        return Ok(None);
    }
    let mut bytes = vec![0; REPLY_BYTES_MAX];
    match read(&stdin, &mut bytes) {
        Ok(0) => Err(ended("end of file")),
        Ok(count) => {
            bytes.truncate(count);
            Ok(Some(bytes))
        }
        Err(nix::errno::Errno::EINTR | nix::errno::Errno::EAGAIN) => Ok(None),
        Err(errno) => Err(ended(errno.desc())),
    }
}

/// Reads the secret from standard input; called by the new daemon. At a terminal it prompts and
/// disables echo.
///
/// # Errors
/// The system's error.
pub(crate) fn read_secret() -> std::io::Result<String> {
    let _hidden = stdin().is_terminal().then(EchoOff::begin);
    let mut line = String::new();
    BufReader::new(stdin())
        .take(BOOTSTRAP_BYTES_MAX as u64)
        .read_line(&mut line)?;
    let line = line.trim();
    Ok(line.strip_prefix("PVM_VMID=").unwrap_or(line).to_string())
}

/// Disables the terminal's echo until dropped.
struct EchoOff(Option<Termios>);

impl EchoOff {
    fn begin() -> EchoOff {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut quiet) = before.clone() {
            // An interrupt would leave the echo disabled.
            quiet
                .local_flags
                .remove(LocalFlags::ECHO | LocalFlags::ISIG);
            let _ = tcsetattr(stdin(), SetArg::TCSANOW, &quiet);
        }
        let _ = write!(
            stderr(),
            "Secret that the master shows (hidden; an empty one ends this): "
        );
        EchoOff(before)
    }
}

impl Drop for EchoOff {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
        }
        let _ = writeln!(stderr());
    }
}
