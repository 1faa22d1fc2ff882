//! Manual start of a daemon (`so=ms`), as in PVM: the master prints the command that a person must
//! type on the other host, and reads the new daemon's reply from its standard input.
//!
//! The certificate is delivered as with a hoster ([`super::sealed_bootstrap`]). The person enters a
//! one-time secret on the other host, where the new daemon reads it with [`read_secret`]. The
//! person then types the new daemon's reply at the master's terminal.

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
/// Interval at which standard input is polled for a reply. A blocking read is not possible for two
/// reasons. The master must not read while it is in the background of its terminal, and no signal
/// reports when it enters the background. A blocked read would also delay the daemon's end.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of bytes of a typed reply.
const TYPED_REPLY_BYTES_MAX: usize = 4096;

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
pub(crate) fn check_person_reachable() -> Result<(), Refusal> {
    let reason = if stdin().is_terminal() {
        if may_read_terminal() {
            return Ok(());
        }
        "it runs in the background of its terminal"
    } else {
        let file_type = fstat(stdin()).map_or(SFlag::empty(), |stat| {
            SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
        });
        if [SFlag::S_IFIFO, SFlag::S_IFSOCK].contains(&file_type) {
            return Ok(());
        }
        "its standard input is not a terminal"
    };
    Err(cannot_start(format!(
        "so=ms means a start by hand, and the master cannot prompt for it: {reason}; start the master with \"pvmd \
         hostfile\" in the foreground of a terminal, or omit so=ms to use ssh"
    )))
}

/// False if the terminal would stop this process for reading.
fn may_read_terminal() -> bool {
    // A terminal that is not the controlling terminal can always be read.
    tcgetpgrp(stdin()).map_or(true, |foreground_group| foreground_group == getpgrp())
}

/// Asks a person to start one daemon and waits for the reply. Returns the reply that the person has
/// typed. At most one call may run at a time, because there is one terminal.
///
/// # Errors
/// The new daemon's refusal, or no valid reply was typed.
pub(crate) async fn ask_for_start(order: &HosterOrder) -> Result<ReadyReply, Refusal> {
    // Input that was typed before the question is not a reply to the question.
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
         It asks for a secret, which is valid for this start only:\n{secret}\nType response: "
    ))
    .await;
    let mut notice = WithdrawalNotice {
        login,
        is_pending: true,
    };
    let typed_line = timeout(REPLY_TIMEOUT, read_reply_line()).await;
    notice.is_pending = false;
    let result = match typed_line {
        Ok(Ok(line)) => parse_reply(&line).unwrap_or_else(|| {
            Err(cannot_start(format!(
                "{line:?} is not the reply of a daemon, which begins with ddpro<"
            )))
        }),
        Ok(Err(refusal)) => Err(refusal),
        Err(_) => Err(cannot_start(format!(
            "no answer was typed within {} s",
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

/// When dropped while the question is pending, tells the person that the question is withdrawn, for
/// example because the daemon ends.
struct WithdrawalNotice<'a> {
    login: &'a str,
    is_pending: bool,
}

impl Drop for WithdrawalNotice<'_> {
    fn drop(&mut self) {
        if self.is_pending {
            print_in_thread(
                format!("\nthe start of {} was cancelled\n", self.login),
                None,
            );
        }
    }
}

/// Prints to standard error and waits until the text is written.
async fn print(text: String) {
    let (done_sender, done_receiver) = oneshot::channel();
    print_in_thread(text, Some(done_sender));
    let _ = done_receiver.await;
}

/// Prints from a separate thread, because a stopped terminal must not stop the daemon. Sends to
/// `done_sender` when the text is written.
fn print_in_thread(text: String, done_sender: Option<oneshot::Sender<()>>) {
    std::thread::spawn(move || {
        // If the terminal no longer exists, the wait for the reply times out.
        let _ = stderr().write_all(text.as_bytes());
        done_sender.map(|done_sender| done_sender.send(()))
    });
}

/// Waits for the next line that is not blank and returns it.
async fn read_reply_line() -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    loop {
        while let Some(new_bytes) = read_available()? {
            bytes.extend(new_bytes);
            while let Some(newline_index) = bytes.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = bytes.drain(..=newline_index).collect();
                let line = String::from_utf8_lossy(&line).trim().to_string();
                if !line.is_empty() {
                    return Ok(line);
                }
            }
            if bytes.len() > TYPED_REPLY_BYTES_MAX {
                return Err(cannot_start(format!(
                    "the answer is longer than {TYPED_REPLY_BYTES_MAX} bytes"
                )));
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns the bytes that can be read without waiting; `None` if there are none.
///
/// # Errors
/// Standard input is at its end or cannot be read.
fn read_available() -> Result<Option<Vec<u8>>, Refusal> {
    let stdin = stdin();
    let input_ended_refusal = |why: &str| {
        cannot_start(format!(
            "the master's standard input has ended ({why}), so no answer can be typed"
        ))
    };
    let mut poll_fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    let input_is_ready = poll(&mut poll_fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    if !input_is_ready || stdin.is_terminal() && !may_read_terminal() {
        return Ok(None);
    }
    let mut bytes = vec![0; TYPED_REPLY_BYTES_MAX];
    match read(&stdin, &mut bytes) {
        Ok(0) => Err(input_ended_refusal("end of file")),
        Ok(byte_count) => {
            bytes.truncate(byte_count);
            Ok(Some(bytes))
        }
        Err(nix::errno::Errno::EINTR | nix::errno::Errno::EAGAIN) => Ok(None),
        Err(errno) => Err(input_ended_refusal(errno.desc())),
    }
}

/// Reads the secret from standard input and returns it. Called by the new daemon. If standard input
/// is a terminal, prints a prompt and disables echo.
///
/// # Errors
/// Standard input cannot be read.
pub(crate) fn read_secret() -> std::io::Result<String> {
    let _echo_guard = stdin().is_terminal().then(EchoOff::begin);
    let mut line = String::new();
    BufReader::new(stdin())
        .take(BOOTSTRAP_BYTES_MAX as u64)
        .read_line(&mut line)?;
    let line = line.trim();
    Ok(line.strip_prefix("PVM_VMID=").unwrap_or(line).to_string())
}

/// Disables the terminal's echo until this value is dropped. Contains the previous settings of the
/// terminal.
struct EchoOff(Option<Termios>);

impl EchoOff {
    fn begin() -> Self {
        let previous_settings = tcgetattr(stdin()).ok();
        if let Some(mut silent_settings) = previous_settings.clone() {
            // Interrupts are disabled, too: an interrupt would end the process with the echo still
            // disabled.
            silent_settings
                .local_flags
                .remove(LocalFlags::ECHO | LocalFlags::ISIG);
            let _ = tcsetattr(stdin(), SetArg::TCSANOW, &silent_settings);
        }
        let _ = write!(
            stderr(),
            "Secret that the master shows (hidden; an empty one ends this): "
        );
        Self(previous_settings)
    }
}

impl Drop for EchoOff {
    fn drop(&mut self) {
        if let Some(previous_settings) = &self.0 {
            let _ = tcsetattr(stdin(), SetArg::TCSANOW, previous_settings);
        }
        let _ = writeln!(stderr());
    }
}
