//! Messages between the load watcher of a machine, which the tasker service starts, and the load
//! watchers of the virtual machines on this machine.
//!
//! The load watcher of the machine observes the machine once for all virtual machines. It derives
//! for each what its guests may do, and sends the result whenever it has changed, and with each
//! sample. The load watcher of a virtual machine passes the result to its daemon and to its
//! resource manager.
//!
//! Each message is the length of its body in four bytes, and the body.

use crate::guests::GuestDecision;
use crate::host_policy::{PolicyFile, PolicySummary};
use crate::owner::OwnerAssessment;
use nix::sys::socket::UnixAddr;
use sempa_proto::frame;
use sempa_proto::load::LoadSample;
use sempa_proto::tasker_service;
use sempa_socket::connect_without_waiting;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the socket of the machine's load watcher, in the directory of the tasker service's
/// socket.
pub const SOCKET_NAME: &str = "owner.sock";
/// Version of the messages. Load watchers of two versions do not work together: that of the virtual
/// machine then observes the machine itself.
pub const PROTOCOL_VERSION: u32 = 1;
/// Maximum length in bytes of the body of a message to the machine's load watcher. A policy file
/// has at most 64 KiB.
pub const REQUEST_BYTES_MAX: usize = 192 << 10;
/// Maximum length in bytes of the body of a message from the machine's load watcher.
pub const STATE_BYTES_MAX: usize = 1 << 20;
/// Length in bytes of the field before the body of a message.
const HEAD_BYTES: usize = 4;
/// Maximum number of reads of a connection before other connections are served.
const READS_MAX: usize = 16;

/// The facts about a virtual machine that the machine's load watcher needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFacts {
    /// Must be [`PROTOCOL_VERSION`]; another version is refused.
    pub protocol: u32,
    /// True if a resource manager runs, which migrates tasks for owners.
    pub has_rm: bool,
    /// Settings that the user of the virtual machine asks for where owner and administrator set
    /// nothing, in the format of a policy file.
    pub guest_defaults: String,
    /// Policy file of the user of the virtual machine.
    pub user_policy: PolicyFile,
    /// Process id of the daemon; its load is no sign of an owner.
    pub daemon_pid: Option<i32>,
}

/// A message to the load watcher of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMachine {
    /// The first message, and each change.
    Facts(VmFacts),
    /// Answer with [`FromMachine::Pong`] and this number.
    Ping(u64),
}

/// The state of the machine for one virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostState {
    /// `task_cpus` counts the tasks of this virtual machine.
    pub sample: LoadSample,
    pub assessment: OwnerAssessment,
    pub decision: GuestDecision,
    pub policy: PolicySummary,
}

/// A message from the load watcher of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromMachine {
    State(Box<HostState>),
    Pong(u64),
    /// The virtual machine is not served; contains the reason. The connection ends.
    Refused(String),
}

/// Encodes a message with its length.
///
/// # Errors
/// The message is longer than the length field permits.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = frame::to_bytes(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    Ok([&length.to_le_bytes()[..], &body].concat())
}

/// Sends a message without waiting. The receiver reads in time, or is not worth waiting for: a
/// message that does not fit into the kernel's buffer is an error, and the connection must be
/// closed.
///
/// # Errors
/// The message was not sent completely.
pub fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(message)?)
}

/// Returns the path of the socket of the machine's load watcher; `None` if the tasker service is
/// not used.
pub fn socket_path() -> Option<PathBuf> {
    let variable = std::env::var_os(tasker_service::SOCKET_VARIABLE);
    let service_socket = tasker_service::socket_path(variable)?;
    Some(service_socket.with_file_name(SOCKET_NAME))
}

/// Connects to a load watcher without waiting. The connection is non-blocking.
///
/// # Errors
/// No process listens, or too many connections wait.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    connect_without_waiting(&UnixAddr::new(path)?)
}

/// Asks the load watcher of the machine whether it runs.
///
/// # Errors
/// The load watcher does not answer in time.
pub fn ask_alive(path: &Path, timeout: Duration) -> io::Result<()> {
    let stream = connect(path)?;
    send(&stream, &ToMachine::Ping(1))?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(timeout))?;
    let mut answer = encode(&FromMachine::Pong(1))?;
    (&stream).read_exact(&mut answer)
}

/// Collects the bytes of a connection into messages.
#[derive(Debug)]
pub struct MessageReader<T> {
    bytes: Vec<u8>,
    body_bytes_max: usize,
    message: PhantomData<T>,
}

impl<T: DeserializeOwned> MessageReader<T> {
    pub fn new(body_bytes_max: usize) -> Self {
        Self {
            bytes: Vec::new(),
            body_bytes_max,
            message: PhantomData,
        }
    }

    /// Reads what has arrived on a non-blocking connection, at most `READS_MAX` buffers. Returns
    /// the complete messages.
    ///
    /// # Errors
    /// The connection has ended, or a message is too long or malformed.
    pub fn read(&mut self, mut stream: &UnixStream) -> io::Result<Vec<T>> {
        let mut buffer = [0; 16 << 10];
        let mut messages = Vec::new();
        for _ in 0..READS_MAX {
            match stream.read(&mut buffer) {
                // The end is reported after the messages before it.
                Ok(0) if !messages.is_empty() => break,
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => messages.extend(self.push(&buffer[..count])?),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            }
        }
        Ok(messages)
    }

    /// Adds bytes that have arrived. Returns the messages that are complete now.
    ///
    /// # Errors
    /// A message is too long or malformed.
    pub fn push(&mut self, bytes: &[u8]) -> io::Result<Vec<T>> {
        self.bytes.extend_from_slice(bytes);
        let (mut messages, mut start) = (Vec::new(), 0);
        while let Some((head, rest)) = self.bytes[start..].split_first_chunk::<HEAD_BYTES>() {
            let length = u32::from_le_bytes(*head) as usize;
            if length > self.body_bytes_max {
                return Err(io::Error::other(format!(
                    "a message of {length} bytes; the limit is {}",
                    self.body_bytes_max
                )));
            }
            let Some(body) = rest.get(..length) else {
                break;
            };
            messages.push(frame::from_bytes(body).map_err(io::Error::other)?);
            start += HEAD_BYTES + length;
        }
        self.bytes.drain(..start);
        Ok(messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_policy::PolicyFileContent;
    use proptest::prelude::*;

    fn connection() -> (UnixStream, UnixStream) {
        let (near, far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("a socket");
        (near, far)
    }

    fn facts(text: &str) -> ToMachine {
        ToMachine::Facts(VmFacts {
            protocol: PROTOCOL_VERSION,
            has_rm: true,
            guest_defaults: String::new(),
            user_policy: PolicyFile {
                name: "owner.toml".into(),
                content: PolicyFileContent::Text(text.into()),
            },
            daemon_pid: Some(1),
        })
    }

    /// Messages arrive whole and in order, wherever the stream is cut.
    #[test]
    fn messages_are_read_from_pieces() {
        let (near, mut far) = connection();
        let sent = [ToMachine::Ping(1), facts("cores = 2\n"), ToMachine::Ping(2)];
        let bytes: Vec<u8> = sent
            .iter()
            .flat_map(|message| encode(message).expect("short"))
            .collect();
        let mut reader = MessageReader::<ToMachine>::new(REQUEST_BYTES_MAX);
        let mut received = Vec::new();
        for piece in bytes.chunks(3) {
            far.write_all(piece).expect("room");
            received.extend(reader.read(&near).expect("valid"));
        }
        assert_eq!(received, sent);
        far.write_all(&bytes).expect("room");
        drop(far);
        assert_eq!(reader.read(&near).expect("valid"), sent);
        assert!(reader.read(&near).is_err(), "it has ended");
    }

    /// A message that is longer than permitted ends the connection before it is stored.
    #[test]
    fn long_message_is_refused() {
        let (near, mut far) = connection();
        let head = u32::try_from(REQUEST_BYTES_MAX + 1).expect("it fits");
        far.write_all(&head.to_le_bytes()).expect("room");
        let mut reader = MessageReader::<ToMachine>::new(REQUEST_BYTES_MAX);
        let error = reader.read(&near).expect_err("too long").to_string();
        assert!(error.contains("the limit is"), "{error}");
    }

    proptest! {
        /// Arbitrary bytes are a message, incomplete, or an error; they cause no panic.
        #[test]
        fn arbitrary_bytes_cause_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (near, mut far) = connection();
            far.write_all(&bytes).expect("room");
            let _ = MessageReader::<ToMachine>::new(REQUEST_BYTES_MAX).read(&near);
            far.write_all(&bytes).expect("room");
            let _ = MessageReader::<FromMachine>::new(STATE_BYTES_MAX).read(&near);
        }
    }
}
