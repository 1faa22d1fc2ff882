//! The connection of a virtual machine's load watcher to the load watcher of the machine.

use crate::own_sense::User;
use crate::watcher::daemon_pid;
use crate::{Args, GuestDefaults};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pvm_load_watcher::file_watcher::{FileWatcher, WakeReasons, WatchedPath};
use pvm_load_watcher::host_policy::PolicyFile;
use pvm_load_watcher::machine_link::{
    self, FromMachine, HostState, MessageReader, PROTOCOL_VERSION, STATE_BYTES_MAX, ToMachine,
    VmFacts, send,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Time for an answer to a ping. The daemon replaces a load watcher that does not answer within a
/// few seconds, so this one must notice earlier that the machine's load watcher hangs.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
/// Time without any message after which the machine's load watcher is not waited for. It sends a
/// state with each sample, at least every five seconds.
const SILENCE_MAX: Duration = Duration::from_secs(12);

pub(crate) struct MachineClient {
    stream: UnixStream,
    reader: MessageReader<FromMachine>,
    facts: VmFacts,
    /// Watches the policy file of the user.
    user_policy: FileWatcher,
    last_ping: u64,
    /// Time at which the last ping was sent; `None` if it is answered.
    pinged_at: Option<Instant>,
    heard_at: Instant,
}

/// The messages that have arrived from the machine's load watcher.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    /// The newest state; `None` if no state has arrived.
    pub(crate) state: Option<Box<HostState>>,
    /// True if the last ping is answered.
    pub(crate) is_alive: bool,
}

impl MachineClient {
    /// Connects to the load watcher of the machine and describes the virtual machine.
    ///
    /// # Errors
    /// There is no load watcher of the machine, or the connection failed.
    pub(crate) fn connect(args: &Args, user: &User, has_rm: bool) -> io::Result<Self> {
        let path = machine_link::socket_path().ok_or(io::ErrorKind::NotFound)?;
        let stream = machine_link::connect(&path)?;
        let user_policy = FileWatcher::new(vec![WatchedPath::settings(user.policy_path.clone())]);
        let GuestDefaults { text, .. } = &args.guest_defaults;
        let client = Self {
            stream,
            reader: MessageReader::new(STATE_BYTES_MAX),
            facts: VmFacts {
                protocol: PROTOCOL_VERSION,
                has_rm,
                guest_defaults: text.clone(),
                user_policy: PolicyFile::read(&user.policy_path),
                daemon_pid: daemon_pid(),
            },
            user_policy,
            last_ping: 0,
            pinged_at: None,
            heard_at: Instant::now(),
        };
        send(&client.stream, &ToMachine::Facts(client.facts.clone()))?;
        Ok(client)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Waits until the user's policy may have changed, `fd` is readable, or the time is over.
    pub(crate) fn wait(&mut self, timeout: Duration, fd: BorrowedFd<'_>) -> WakeReasons {
        let timeout = timeout.min(self.time_until_lost(Instant::now()));
        self.user_policy.wait(timeout, Some(fd))
    }

    /// Reads what has arrived.
    ///
    /// # Errors
    /// The connection is lost, or the virtual machine is not served.
    pub(crate) fn receive(&mut self) -> io::Result<Arrived> {
        let mut arrived = Arrived::default();
        for message in self.reader.read(&self.stream)? {
            self.heard_at = Instant::now();
            match message {
                FromMachine::State(state) => arrived.state = Some(state),
                FromMachine::Pong(number) if number == self.last_ping => {
                    self.pinged_at = None;
                    arrived.is_alive = true;
                }
                FromMachine::Pong(_) => {}
                FromMachine::Refused(reason) => return Err(io::Error::other(reason)),
            }
        }
        Ok(arrived)
    }

    /// Waits for the first state.
    ///
    /// # Errors
    /// None arrives within the time, the connection is lost, or the virtual machine is not served.
    pub(crate) fn wait_for_state(&mut self, timeout: Duration) -> io::Result<HostState> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(state) = self.receive()?.state {
                return Ok(*state);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let millis = remaining.as_millis() + 1;
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            // A failure has the effect of a wake-up without a reason.
            let _ = poll(&mut [PollFd::new(self.fd(), PollFlags::POLLIN)], timeout);
        }
    }

    /// Asks whether the machine's load watcher runs. [`Arrived::is_alive`] is the answer.
    ///
    /// # Errors
    /// The connection is lost.
    pub(crate) fn ping(&mut self) -> io::Result<()> {
        self.last_ping += 1;
        self.pinged_at.get_or_insert_with(Instant::now);
        send(&self.stream, &ToMachine::Ping(self.last_ping))
    }

    /// Sends whether a resource manager runs, if that has changed.
    ///
    /// # Errors
    /// The connection is lost.
    pub(crate) fn set_has_rm(&mut self, has_rm: bool) -> io::Result<()> {
        self.change_facts(|facts| facts.has_rm = has_rm)
    }

    /// Sends the user's policy file, if it has changed.
    ///
    /// # Errors
    /// The connection is lost.
    pub(crate) fn read_user_policy(&mut self) -> io::Result<()> {
        self.user_policy.set_missing_watches(0);
        let file = PolicyFile::read(self.user_policy.path(0));
        self.change_facts(|facts| facts.user_policy = file)
    }

    /// As [`MachineClient::read_user_policy`], if no watch reports changes of the file.
    ///
    /// # Errors
    /// The connection is lost.
    pub(crate) fn retry_user_policy(&mut self) -> io::Result<()> {
        match self.user_policy.retry_watch(0) {
            true => self.read_user_policy(),
            false => Ok(()),
        }
    }

    fn change_facts(&mut self, change: impl FnOnce(&mut VmFacts)) -> io::Result<()> {
        let mut facts = self.facts.clone();
        change(&mut facts);
        if facts == self.facts {
            return Ok(());
        }
        self.facts = facts.clone();
        send(&self.stream, &ToMachine::Facts(facts))
    }

    /// Returns the time after which the machine's load watcher counts as lost if nothing arrives.
    pub(crate) fn time_until_lost(&self, now: Instant) -> Duration {
        let pong_due = self.pinged_at.map(|at| at + PONG_TIMEOUT);
        let due = (self.heard_at + SILENCE_MAX).min(pong_due.unwrap_or(now + SILENCE_MAX));
        due.saturating_duration_since(now)
    }
}
