//! The addresses at which a daemon can be reached: those of its interfaces, or those that the user
//! sets.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// Maximum number of announced addresses; a slave's reply must fit on one short line.
pub(crate) const ADDRESSES_MAX: usize = 5;

/// Returns the addresses to announce with this port, most useful first.
///
/// If `SEMPA_ADDRESS` is set (`announced`), only its addresses are returned. Otherwise the
/// `preferred` addresses come first, then all other interface addresses; loopback is used only if
/// there is no other address.
///
/// # Errors
/// One sentence if `announced` contains a word that is not an address.
pub(crate) fn addresses_to_announce(
    announced: Option<&str>,
    preferred: &[IpAddr],
    port: u16,
) -> Result<Vec<SocketAddr>, String> {
    if let Some(list) = announced {
        let parse = |word: &str| {
            word.parse::<IpAddr>()
                .map_err(|_| format!("SEMPA_ADDRESS: {word:?} is not an IP address"))
        };
        let words = list
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        let ips = words.map(parse).collect::<Result<Vec<_>, _>>()?;
        return Ok(ips
            .into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .take(ADDRESSES_MAX)
            .collect());
    }
    let mut ips: Vec<IpAddr> = preferred
        .iter()
        .copied()
        .filter(|ip| !ip.is_loopback())
        .collect();
    let own = interface_addresses();
    // IPv4 first: hosts of one lab reach each other most often over IPv4.
    for wanted in [IpAddr::is_ipv4 as fn(&IpAddr) -> bool, IpAddr::is_ipv6] {
        for ip in own.iter().filter(|ip| wanted(ip) && !ip.is_loopback()) {
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

/// Returns the addresses of all interfaces that are up. Link-local addresses are left out: they are
/// ambiguous without an interface.
fn interface_addresses() -> Vec<IpAddr> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else {
        return Vec::new();
    };
    let up = nix::net::if_::InterfaceFlags::IFF_UP;
    all.filter(|i| i.flags.contains(up))
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

/// Returns the addresses of a host name; empty if there are none.
pub(crate) fn resolve(name: &str) -> Vec<IpAddr> {
    let Ok(found) = (name, 0).to_socket_addrs() else {
        return Vec::new();
    };
    found.map(|a| a.ip()).collect()
}

/// Returns client and server address of the ssh session that started this process
/// (`SSH_CONNECTION`: client address, client port, server address, server port; sshd(8)).
pub(crate) fn ssh_session_addresses(variable: Option<&str>) -> Option<(IpAddr, IpAddr)> {
    let words: Vec<&str> = variable?.split_whitespace().collect();
    let [client, _, server, _] = words[..] else {
        return None;
    };
    // A scoped address (`%eth0`) does not parse, and its scope would be valid only at the other
    // end.
    Some((client.parse().ok()?, server.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_addresses_replace_all_others() {
        let got = addresses_to_announce(Some("127.0.0.1, ::1"), &[IpAddr::from([10, 0, 0, 9])], 7)
            .expect("addresses");
        assert_eq!(
            got,
            ["127.0.0.1:7", "[::1]:7"].map(|a| a.parse().expect("an address"))
        );
        assert!(addresses_to_announce(Some("nowhere"), &[], 7).is_err());
        let own =
            addresses_to_announce(None, &[IpAddr::from([10, 0, 0, 9])], 7).expect("addresses");
        assert_eq!(own[0], "10.0.0.9:7".parse().expect("an address"));
    }

    /// `SSH_CONNECTION` yields client and server address; scoped addresses are ignored.
    #[test]
    fn ssh_session_yields_both_addresses() {
        let both =
            ssh_session_addresses(Some("10.77.0.1 40112 10.77.0.2 22")).expect("two addresses");
        assert_eq!(
            both,
            (IpAddr::from([10, 77, 0, 1]), IpAddr::from([10, 77, 0, 2]))
        );
        assert_eq!(
            ssh_session_addresses(Some("fe80::1%eth0 1 fe80::2%eth0 22")),
            None
        );
        assert_eq!(ssh_session_addresses(None), None);
    }
}
