//! The addresses at which a daemon can be reached: the addresses of its interfaces, or the
//! addresses that the user has set.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// Maximum number of announced addresses. A slave must be able to announce all of its addresses
/// within the length limit of its reply line.
pub(crate) const ADDRESSES_MAX: usize = 5;

/// Returns the addresses to announce with the port `port`, most useful first, at most
/// [`ADDRESSES_MAX`].
///
/// If `configured_list` (the value of `SEMPA_ADDRESS`) is set, only the addresses in it are
/// returned. Otherwise the `preferred_ips` addresses are first, followed by all other interface
/// addresses. A loopback address is returned only if there is no other address.
///
/// # Errors
/// One sentence if `configured_list` contains a word that is not an address.
pub(crate) fn addresses_to_announce(
    configured_list: Option<&str>,
    preferred_ips: &[IpAddr],
    port: u16,
) -> Result<Vec<SocketAddr>, String> {
    if let Some(address_list) = configured_list {
        let parse_ip = |word: &str| {
            word.parse::<IpAddr>()
                .map_err(|_| format!("SEMPA_ADDRESS: {word:?} is not an IP address"))
        };
        let words = address_list
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        let ips = words.map(parse_ip).collect::<Result<Vec<_>, _>>()?;
        return Ok(ips
            .into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .take(ADDRESSES_MAX)
            .collect());
    }
    let mut ips: Vec<IpAddr> = preferred_ips
        .iter()
        .copied()
        .filter(|ip| !ip.is_loopback())
        .collect();
    let local_ips = interface_addresses();
    // IPv4 addresses are first, because most hosts in one network reach each other over IPv4.
    for is_family in [IpAddr::is_ipv4 as fn(&IpAddr) -> bool, IpAddr::is_ipv6] {
        for ip in local_ips
            .iter()
            .filter(|ip| is_family(ip) && !ip.is_loopback())
        {
            if !ips.contains(ip) {
                ips.push(*ip);
            }
        }
    }
    if ips.is_empty() {
        ips.push(IpAddr::from([127, 0, 0, 1]));
    }
    ips.truncate(ADDRESSES_MAX);
    Ok(ips
        .into_iter()
        .map(|ip| SocketAddr::new(ip, port))
        .collect())
}

/// Returns the addresses of all interfaces that are up. Link-local addresses are omitted, because a
/// link-local address is ambiguous without an interface.
fn interface_addresses() -> Vec<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else {
        return Vec::new();
    };
    let up_flag = nix::net::if_::InterfaceFlags::IFF_UP;
    interfaces
        .filter(|i| i.flags.contains(up_flag))
        .filter_map(|i| i.address)
        .filter_map(|a| {
            let v4 = a.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| a.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        })
        .filter(|ip| match ip {
            IpAddr::V4(v4) => !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        })
        .collect()
}

/// Returns the addresses of the host `name`; empty if the name cannot be resolved.
pub(crate) fn resolve(name: &str) -> Vec<IpAddr> {
    let Ok(socket_addresses) = (name, 0).to_socket_addrs() else {
        return Vec::new();
    };
    socket_addresses.map(|a| a.ip()).collect()
}

/// Returns the client's and the server's address of the ssh session that started this process.
/// `ssh_connection` is the value of `SSH_CONNECTION` (client address, client port, server address,
/// server port; sshd(8)). Returns `None` if the variable is not set or malformed.
pub(crate) fn ssh_session_addresses(ssh_connection: Option<&str>) -> Option<(IpAddr, IpAddr)> {
    let words: Vec<&str> = ssh_connection?.split_whitespace().collect();
    let [client_ip, _, server_ip, _] = words[..] else {
        return None;
    };
    // A scoped address (`%eth0`) is refused by the parser. The scope would be valid on the other
    // host only.
    Some((client_ip.parse().ok()?, server_ip.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_addresses_replace_all_others() {
        let returned_addresses =
            addresses_to_announce(Some("127.0.0.1, ::1"), &[IpAddr::from([10, 0, 0, 9])], 7)
                .expect("addresses");
        assert_eq!(
            returned_addresses,
            ["127.0.0.1:7", "[::1]:7"].map(|a| a.parse().expect("an address"))
        );
        assert!(addresses_to_announce(Some("nowhere"), &[], 7).is_err());
        let local_addresses =
            addresses_to_announce(None, &[IpAddr::from([10, 0, 0, 9])], 7).expect("addresses");
        assert_eq!(
            local_addresses[0],
            "10.0.0.9:7".parse().expect("an address")
        );
    }

    /// `SSH_CONNECTION` yields client and server address; scoped addresses are ignored.
    #[test]
    fn ssh_session_yields_both_addresses() {
        let address_pair =
            ssh_session_addresses(Some("10.77.0.1 40112 10.77.0.2 22")).expect("two addresses");
        assert_eq!(
            address_pair,
            (IpAddr::from([10, 77, 0, 1]), IpAddr::from([10, 77, 0, 2]))
        );
        assert_eq!(
            ssh_session_addresses(Some("fe80::1%eth0 1 fe80::2%eth0 22")),
            None
        );
        assert_eq!(ssh_session_addresses(None), None);
    }
}
