//! Finds sockets of a task that are connected to other processes; such sockets cannot be migrated.
//! The sockets of the task's library are exempt (see `descriptors`): the library closes them before
//! the dump.

use super::attributes;
use super::inspect::{unreadable, unsupported_resource};
use super::verdict::unreadable as unreadable_property;
use crate::proc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::Process;
use sempa_proto::migration::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::path::Path;

/// Size in bytes of the buffer for one netlink reply.
const REPLY_BUFFER_BYTES: usize = 64 << 10;

/// Inode number with which the kernel reports the other end of a connection if nobody has it open.
/// The engine dumps such a half of a connection.
const CLOSED_PEER: u64 = 0;

/// Extended attribute of a socket in /proc/PID/fd that contains the name of its protocol.
const PROTOCOL_ATTRIBUTE: &CStr = c"system.sockprotoname";
/// Maximum length in bytes of the name of a protocol, in the kernel.
const PROTOCOL_NAME_BYTES_MAX: usize = 32;
/// Names of the protocols of sockets that the engine migrates.
const SUPPORTED_PROTOCOLS: [&str; 12] = [
    "UNIX",
    "UNIX-STREAM",
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "NETLINK",
    "PACKET",
];

/// A Unix socket of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnixSocket {
    /// Inode number of the connected socket; `None` if the socket is not connected.
    pub(super) peer_inode: Option<u64>,
    /// Address to which the socket is bound, if any. An accepted socket has the address of the
    /// listening socket.
    pub(super) address: Option<String>,
}

/// All Unix sockets of this network namespace, by inode number.
pub(super) type UnixTable = BTreeMap<u64, UnixSocket>;

/// Checks that no socket of the task is connected to another process. Returns the addresses to
/// which sockets of the task are bound. `task_sockets` are the inode numbers of the task's sockets,
/// and `library_sockets` those of the sockets that its library closes before the dump.
pub(super) fn check_connections(
    root_pid: i32,
    task_sockets: &BTreeSet<u64>,
    library_sockets: &BTreeSet<u64>,
) -> Result<Vec<IpAddr>, Refusal> {
    if task_sockets.is_empty() && library_sockets.len() < 2 {
        return Ok(Vec::new());
    }
    let unreadable_sockets = |e: io::Error| unreadable_property("the list of sockets", &e);
    let unix_sockets = unix_table().map_err(unreadable_sockets)?;
    if let Some(connection) = foreign_unix_connection(task_sockets, &unix_sockets) {
        return Err(unsupported_resource(connection));
    }
    if daemon_connection_count(library_sockets, &unix_sockets) > 1 {
        return Err(unsupported_resource("a process that is a task of its own"));
    }
    let process = Process::new(root_pid).map_err(proc::into_io_error);
    let process = process.map_err(|e| unreadable("its sockets", &e))?;
    let mut addresses = BTreeSet::new();
    for table in [process.tcp(), process.tcp6()] {
        // A kernel without IPv6 lacks the second table.
        let table = proc::none_if_ended(table.map_err(proc::into_io_error));
        let table = table.map_err(unreadable_sockets)?.unwrap_or_default();
        if let Some(connection) = tcp_connection(task_sockets, &table) {
            return Err(unsupported_resource(connection));
        }
        let local_addresses = table.iter().map(|entry| (entry.inode, entry.local_address));
        addresses.extend(bound_addresses(task_sockets, local_addresses));
    }
    for table in [process.udp(), process.udp6()] {
        let table = proc::none_if_ended(table.map_err(proc::into_io_error));
        let table = table.map_err(unreadable_sockets)?.unwrap_or_default();
        let local_addresses = table.iter().map(|entry| (entry.inode, entry.local_address));
        addresses.extend(bound_addresses(task_sockets, local_addresses));
    }
    Ok(addresses.into_iter().collect())
}

/// Describes the first Unix socket of the task that is connected to another process; `None` if no
/// socket is. `task_sockets` are the inode numbers of the task's sockets.
pub(super) fn foreign_unix_connection(
    task_sockets: &BTreeSet<u64>,
    table: &UnixTable,
) -> Option<String> {
    let foreign_inode = task_sockets.iter().find_map(|inode| {
        table
            .get(inode)?
            .peer_inode
            .filter(|peer| *peer != CLOSED_PEER && !task_sockets.contains(peer))
    })?;
    let name = table
        .get(&foreign_inode)
        .and_then(|socket| socket.address.as_deref())
        .filter(|name| !name.is_empty());
    Some(format!(
        "a Unix socket connected to {}",
        name.unwrap_or("another process")
    ))
}

/// Describes a socket of a kind that the engine does not migrate; `None` for any other. `path` is
/// the descriptor's entry in /proc/PID/fd.
///
/// # Errors
/// The kind cannot be read, or the descriptor was closed.
pub(super) fn unsupported_kind(path: &Path) -> io::Result<Option<String>> {
    let mut name = [0; PROTOCOL_NAME_BYTES_MAX];
    let name = attributes::read_attribute(path, PROTOCOL_ATTRIBUTE, &mut name)?;
    let name = String::from_utf8_lossy(name);
    Ok(describe_unsupported_protocol(name.trim_end_matches('\0')))
}

fn describe_unsupported_protocol(name: &str) -> Option<String> {
    (!SUPPORTED_PROTOCOLS.contains(&name)).then(|| format!("a socket of the kind {name}"))
}

/// Returns the addresses to which these sockets of the task are bound. `local_addresses` are the
/// inode numbers and local addresses of all sockets. Addresses that each host has are omitted, and
/// those of groups.
pub(super) fn bound_addresses(
    task_sockets: &BTreeSet<u64>,
    local_addresses: impl Iterator<Item = (u64, SocketAddr)>,
) -> BTreeSet<IpAddr> {
    local_addresses
        .filter(|(inode, _)| task_sockets.contains(inode))
        .map(|(_, address)| address.ip().to_canonical())
        .filter(|address| !address.is_unspecified() && !address.is_multicast())
        .collect()
}

/// Returns how many sockets of the library are connected to a daemon; each task has one such
/// connection. `table` does not contain direct routes, which are no Unix sockets.
pub(super) fn daemon_connection_count(library_sockets: &BTreeSet<u64>, table: &UnixTable) -> usize {
    library_sockets
        .iter()
        .filter(|inode| table.contains_key(inode))
        .count()
}

/// Describes the first TCP connection of the task in `table`, the entries of /proc/PID/net/tcp or
/// tcp6; `None` if the task has no connection. `task_sockets` are the inode numbers of the task's
/// sockets. Listening and unconnected sockets can be migrated.
pub(super) fn tcp_connection(
    task_sockets: &BTreeSet<u64>,
    table: &[TcpNetEntry],
) -> Option<String> {
    let connection = table.iter().find(|entry| {
        task_sockets.contains(&entry.inode)
            && !matches!(entry.state, TcpState::Close | TcpState::Listen)
    })?;
    Some(format!("a TCP connection to {}", connection.remote_address))
}

/// Queries all Unix sockets from the kernel (sock_diag(7)).
///
/// # Errors
/// The kernel does not have this interface, which the engine needs, too.
pub(super) fn unix_table() -> io::Result<UnixTable> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        Some(SockProtocol::NetlinkSockDiag),
    )?;
    send(netlink.as_raw_fd(), &dump_request(), MsgFlags::empty())?;
    let mut table = UnixTable::new();
    let mut bytes = vec![0u8; REPLY_BUFFER_BYTES];
    loop {
        let byte_count = recv(netlink.as_raw_fd(), &mut bytes, MsgFlags::empty())?;
        if byte_count == 0 || parse_reply(&bytes[..byte_count], &mut table)? {
            return Ok(table);
        }
    }
}

/// Encodes a request for all Unix sockets: a netlink header and a `struct unix_diag_req`.
fn dump_request() -> Vec<u8> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const REQUEST_AND_DUMP: u16 = 0x301;
    const SHOW_NAME_AND_PEER: u32 = 1 | 4;
    let mut request = Vec::with_capacity(40);
    request.extend(40u32.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(REQUEST_AND_DUMP.to_ne_bytes());
    request.extend([0u8; 8]);
    request.extend([libc::AF_UNIX as u8, 0, 0, 0]);
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(0u32.to_ne_bytes());
    request.extend(SHOW_NAME_AND_PEER.to_ne_bytes());
    request.extend([0u8; 8]);
    request
}

/// Adds the sockets in one reply of the kernel to the table. Returns true after the last reply.
/// Fails if the reply is malformed or reports an error.
fn parse_reply(mut bytes: &[u8], table: &mut UnixTable) -> io::Result<bool> {
    const HEADER_BYTES: usize = 16;
    while let (Some(length), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let length = length as usize;
        if length < HEADER_BYTES || length > bytes.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        match i32::from(kind) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let code = u32_at(bytes, HEADER_BYTES).unwrap_or(0) as i32;
                return Err(io::Error::from_raw_os_error(-code));
            }
            _ => parse_socket(&bytes[HEADER_BYTES..length], table),
        }
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
    }
    Ok(false)
}

/// Adds the socket in a `struct unix_diag_msg` with its attributes to the table.
fn parse_socket(message: &[u8], table: &mut UnixTable) {
    const HEADER_BYTES: usize = 16;
    const NAME_ATTRIBUTE: u16 = 0;
    const PEER_ATTRIBUTE: u16 = 2;
    let Some(inode) = u32_at(message, 4) else {
        return;
    };
    let mut socket = UnixSocket::default();
    let mut rest = message.get(HEADER_BYTES..).unwrap_or(&[]);
    while let (Some(length), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else {
            break;
        };
        match kind {
            NAME_ATTRIBUTE => {
                socket.address = Some(
                    String::from_utf8_lossy(value)
                        .trim_end_matches('\0')
                        .to_string(),
                )
            }
            PEER_ATTRIBUTE => socket.peer_inode = u32_at(value, 0).map(u64::from),
            _ => {}
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    table.insert(u64::from(inode), socket);
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(
        bytes.get(offset..offset + 2)?.try_into().ok()?,
    ))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(
        bytes.get(offset..offset + 4)?.try_into().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::FromReadSI;
    use procfs::net::TcpNetEntries;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn connected_socket(peer: u64) -> UnixSocket {
        UnixSocket {
            peer_inode: Some(peer),
            address: None,
        }
    }

    fn bound_socket(name: &str) -> UnixSocket {
        UnixSocket {
            peer_inode: None,
            address: Some(name.into()),
        }
    }

    #[test]
    fn connections_inside_the_task_are_permitted() {
        let table = UnixTable::from([
            (1, connected_socket(2)),
            (2, connected_socket(1)),
            (4, UnixSocket::default()),
            (5, connected_socket(11)),
            (11, bound_socket("/run/other.sock")),
            (6, connected_socket(12)),
        ]);
        let describe_foreign_peer =
            |inodes: &[u64]| foreign_unix_connection(&inodes.iter().copied().collect(), &table);
        assert_eq!(describe_foreign_peer(&[1, 2, 4]), None);
        assert_eq!(
            describe_foreign_peer(&[4, 5]).as_deref(),
            Some("a Unix socket connected to /run/other.sock")
        );
        assert_eq!(
            describe_foreign_peer(&[6]).as_deref(),
            Some("a Unix socket connected to another process")
        );
        assert_eq!(
            describe_foreign_peer(&[1]).as_deref(),
            Some("a Unix socket connected to another process")
        );
        assert_eq!(
            daemon_connection_count(&BTreeSet::from([1, 3]), &table),
            1,
            "3 is none of these: a direct route"
        );
        assert_eq!(daemon_connection_count(&BTreeSet::from([1, 4]), &table), 2);
    }

    /// Half of a socket pair whose other half is closed is no connection to another process.
    #[test]
    fn closed_other_end_is_no_connection() {
        let (kept, closed) = UnixStream::pair().expect("pair");
        let inode = std::fs::metadata(format!("/proc/self/fd/{}", kept.as_raw_fd()))
            .expect("fd")
            .ino();
        let describe = || {
            let table = unix_table().expect("sock_diag");
            foreign_unix_connection(&BTreeSet::from([inode]), &table)
        };
        assert!(describe().is_some());
        drop(closed);
        assert_eq!(describe(), None);
    }

    /// The kernel tells the kind of each socket.
    #[test]
    fn kinds_of_sockets_are_read() {
        let kind_of = |socket: &dyn AsRawFd| {
            let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
            unsupported_kind(Path::new(&path)).expect("readable")
        };
        let (unix_stream, _other) = UnixStream::pair().expect("pair");
        assert_eq!(kind_of(&unix_stream), None);
        let datagram = std::os::unix::net::UnixDatagram::unbound().expect("socket");
        assert_eq!(kind_of(&datagram), None);
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").expect("socket");
        assert_eq!(kind_of(&udp), None);
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("socket");
        assert_eq!(kind_of(&tcp), None);
        assert_eq!(
            describe_unsupported_protocol("AF_VSOCK").as_deref(),
            Some("a socket of the kind AF_VSOCK")
        );
        let error = unsupported_kind(Path::new("/proc/self/fd/99999")).expect_err("it is closed");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Addresses that belong to a host are listed once; those of every host are not.
    #[test]
    fn own_addresses_of_sockets_are_listed() {
        let local_addresses = [
            (1, "10.0.0.1:80"),
            (2, "10.0.0.1:81"),
            (3, "0.0.0.0:82"),
            (4, "10.0.0.9:83"),
            (5, "[::ffff:10.0.0.2]:84"),
            (6, "224.0.0.1:85"),
        ];
        let local_addresses = local_addresses
            .map(|(inode, address)| (inode, address.parse().expect("an address")))
            .into_iter();
        assert_eq!(
            bound_addresses(&BTreeSet::from([1, 2, 3, 5, 6]), local_addresses),
            ["10.0.0.1", "10.0.0.2"]
                .map(|ip| ip.parse().expect("an address"))
                .into()
        );
    }

    #[test]
    fn listening_sockets_are_no_connections() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 50 1 x\n\
            1: 0100007F:1F91 0A00000A:0050 01 00000000:00000000 00:00000000 00000000     0        0 51 1 x\n";
        let TcpNetEntries(table) =
            TcpNetEntries::from_read(table.as_bytes(), procfs::current_system_info())
                .expect("it is complete");
        assert_eq!(tcp_connection(&BTreeSet::from([50]), &table), None);
        let connection = tcp_connection(&BTreeSet::from([50, 51]), &table);
        assert_eq!(
            connection.as_deref(),
            Some("a TCP connection to 10.0.0.10:80")
        );
    }

    #[test]
    fn kernel_reports_peers_and_names() {
        let dir = std::env::temp_dir().join(format!("sempa-sockets-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("dir");
        let path = dir.join("listens.sock");
        let listener = UnixListener::bind(&path).expect("bind");
        let client = UnixStream::connect(&path).expect("connect");
        let (accepted_socket, _) = listener.accept().expect("accept");
        let inode = |fd: i32| {
            std::fs::metadata(format!("/proc/self/fd/{fd}"))
                .expect("fd")
                .ino()
        };
        let (client, accepted_socket) = (
            inode(client.as_raw_fd()),
            inode(accepted_socket.as_raw_fd()),
        );
        let table = unix_table().expect("sock_diag");
        assert_eq!(table[&client].peer_inode, Some(accepted_socket));
        assert_eq!(table[&accepted_socket].address.as_deref(), path.to_str());
        assert_eq!(
            foreign_unix_connection(&BTreeSet::from([client, accepted_socket]), &table),
            None
        );
        assert!(foreign_unix_connection(&BTreeSet::from([client]), &table).is_some());
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
