//! Tests whether datagrams pass between two hosts, without a daemon.
//!
//! The other host answers a datagram twice: from the port that has received the datagram, and from
//! another port. A firewall that permits only answers drops the second one.

use super::facts::{Check, UdpFacts};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// Length in bytes of a datagram: a random number.
const TOKEN_BYTES: usize = 8;
/// Time for which the answering side waits for a datagram.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for which answers are awaited.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval at which the datagram is sent again, because datagrams may be lost.
const RESEND_INTERVAL: Duration = Duration::from_millis(300);

fn bind(port: u16) -> io::Result<UdpSocket> {
    UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Prints its port, and answers datagrams for [`ANSWER_TIMEOUT`].
///
/// # Errors
/// The port is in use.
pub(super) fn answer(port: u16) -> io::Result<()> {
    let socket = bind(port)?;
    let other_socket = bind(0)?;
    println!("port {}", socket.local_addr()?.port());
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut token = [0; TOKEN_BYTES];
    while let Some(timeout) = remaining(deadline) {
        socket.set_read_timeout(Some(timeout))?;
        // Errors of earlier answers are reported here, and concern nobody.
        if let Ok((TOKEN_BYTES, sender)) = socket.recv_from(&mut token) {
            let _ = socket.send_to(&token, sender);
            let _ = other_socket.send_to(&token, sender);
        }
    }
    Ok(())
}

fn remaining(deadline: Instant) -> Option<Duration> {
    let remaining = deadline.saturating_duration_since(Instant::now());
    (!remaining.is_zero()).then_some(remaining)
}

/// Sends datagrams to the answering side at one of these addresses.
pub(super) fn test(addresses: &[SocketAddr], own_port: u16) -> UdpFacts {
    test_within(REPLY_TIMEOUT, addresses, own_port)
}

fn test_within(timeout: Duration, addresses: &[SocketAddr], own_port: u16) -> UdpFacts {
    let untested = |why: String| UdpFacts {
        from_here: Check::NotTested(why.clone()),
        from_there: Check::NotTested(why),
    };
    let socket = match bind(own_port) {
        Ok(socket) => socket,
        Err(error) => return untested(format!("no UDP port can be opened here: {error}")),
    };
    match exchange(&socket, addresses, timeout) {
        Ok((has_answer, has_other_answer)) => {
            let check = |arrives: bool, why: &str| match arrives {
                true => Check::Works,
                false => Check::Fails(why.into()),
            };
            UdpFacts {
                from_here: check(has_answer, "no datagram was answered"),
                from_there: match has_answer || has_other_answer {
                    true => check(has_other_answer, "only answers arrive"),
                    false => Check::NotTested("no datagram was answered".into()),
                },
            }
        }
        Err(error) => untested(error.to_string()),
    }
}

/// Returns whether an answer arrived, and whether one from another port arrived.
fn exchange(
    socket: &UdpSocket,
    addresses: &[SocketAddr],
    timeout: Duration,
) -> io::Result<(bool, bool)> {
    let is_v6 = socket.local_addr()?.is_ipv6();
    let addresses: Vec<SocketAddr> = addresses
        .iter()
        .filter_map(|address| match address {
            SocketAddr::V4(v4) if is_v6 => Some((v4.ip().to_ipv6_mapped(), v4.port()).into()),
            SocketAddr::V6(_) if !is_v6 => None,
            address => Some(*address),
        })
        .collect();
    let token = RandomState::new().hash_one(addresses.len()).to_ne_bytes();
    let deadline = Instant::now() + timeout;
    let (mut has_answer, mut has_other_answer) = (false, false);
    let mut send_at = Instant::now();
    let mut last_error = None;
    while let Some(timeout) = remaining(deadline).filter(|_| !(has_answer && has_other_answer)) {
        if Instant::now() >= send_at {
            last_error = None;
            for address in &addresses {
                last_error = socket.send_to(&token, address).err().or(last_error);
            }
            send_at = Instant::now() + RESEND_INTERVAL;
        }
        socket.set_read_timeout(Some(timeout.min(RESEND_INTERVAL)))?;
        let mut bytes = [0; TOKEN_BYTES];
        // A host without the port may report it; the other address may answer.
        let Ok((TOKEN_BYTES, sender)) = socket.recv_from(&mut bytes) else {
            continue;
        };
        if bytes == token {
            let is_expected = addresses
                .iter()
                .any(|address| address.port() == sender.port());
            has_answer |= is_expected;
            has_other_answer |= !is_expected;
        }
    }
    match last_error.filter(|_| !has_answer) {
        Some(error) => Err(error),
        None => Ok((has_answer, has_other_answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const SHORT: Duration = Duration::from_millis(100);

    /// Answers one datagram, and does so from another port if `other_too`.
    fn answer_in_thread(other_too: bool) -> u16 {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = socket.local_addr().expect("bound").port();
        thread::spawn(move || {
            let mut token = [0; TOKEN_BYTES];
            let (_, sender) = socket.recv_from(&mut token).expect("a datagram");
            socket.send_to(&token, sender).expect("sent");
            if other_too {
                let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
                other.send_to(&token, sender).expect("sent");
            }
        });
        port
    }

    fn test_port(port: u16, timeout: Duration) -> UdpFacts {
        test_within(timeout, &[(Ipv4Addr::LOCALHOST, port).into()], 0)
    }

    #[test]
    fn both_directions_are_tested() {
        let facts = test_port(answer_in_thread(true), Duration::from_secs(60));
        assert_eq!(
            (facts.from_here, facts.from_there),
            (Check::Works, Check::Works)
        );
        let facts = test_port(answer_in_thread(false), Duration::from_secs(1));
        assert_eq!(facts.from_here, Check::Works);
        assert!(matches!(facts.from_there, Check::Fails(_)));
    }

    #[test]
    fn silence_is_a_failure() {
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let facts = test_port(silent.local_addr().expect("bound").port(), SHORT);
        assert!(matches!(facts.from_here, Check::Fails(_)));
        assert!(matches!(facts.from_there, Check::NotTested(_)));
    }
}
