//! Asks the hosts of another virtual machine whether one of its daemons still runs.
//!
//! A daemon proves in the handshake that it has a certificate of its virtual machine's authority,
//! before it refuses a peer without such a certificate. So the question needs no secret: the note
//! about a virtual machine ([`sempa_notes`]) contains the certificate of its authority.

use super::pki::{authority_client_config, host_name};
use quinn::{ClientConfig, Endpoint};
use sempa_notes::VmNote;
use sempa_proto::vm_summary::SummaryHost;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time limit for a host to answer. A daemon answers within a round trip, also on a loaded host.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of hosts that are asked. The master is asked first; any other host that answers
/// has a master, or will end within the lease.
const ASKED_HOSTS_MAX: usize = 16;

/// The result of asking the hosts of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryResult {
    /// The daemon of this host answers at this address.
    Answered { host: String, address: SocketAddr },
    /// None of these hosts answers.
    Silent { hosts: Vec<String> },
}

/// Asks the hosts in a note at the same time. Returns the first answer.
pub(crate) async fn ask_hosts(note: &VmNote) -> QueryResult {
    let asked_hosts: Vec<&SummaryHost> = note.summary.hosts.iter().take(ASKED_HOSTS_MAX).collect();
    let silent = QueryResult::Silent {
        hosts: asked_hosts.iter().map(|host| host.name.clone()).collect(),
    };
    let Some(config) = note
        .authority_certificate()
        .and_then(|certificate| authority_client_config(&certificate).ok())
    else {
        return silent;
    };
    let config = ClientConfig::new(Arc::new(config));
    let mut questions = JoinSet::new();
    for host in asked_hosts {
        for address in &host.addresses {
            let server_name = host_name(host.id, &note.vm);
            let (config, address, host) = (config.clone(), *address, host.name.clone());
            questions.spawn(async move {
                let answer = timeout(ANSWER_TIMEOUT, ask_host(config, address, &server_name));
                answer
                    .await
                    .is_ok_and(|has_answered| has_answered)
                    .then_some(QueryResult::Answered { host, address })
            });
        }
    }
    while let Some(result) = questions.join_next().await {
        if let Ok(Some(answer)) = result {
            return answer;
        }
    }
    silent
}

/// True if a daemon with a certificate of the authority answers at this address.
async fn ask_host(config: ClientConfig, address: SocketAddr, server_name: &str) -> bool {
    let any_address = match address.ip() {
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let Ok(endpoint) = Endpoint::client(any_address) else {
        return false;
    };
    let Ok(handshake) = endpoint.connect_with(config, address, server_name) else {
        return false;
    };
    handshake.await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::input::INPUT_QUEUE_MAX;
    use crate::shell::net::{Net, bind_udp};
    use crate::shell::pki::Authority;
    use sempa_proto::HostId;
    use std::path::Path;
    use tokio::sync::mpsc;

    fn note_about(authority_certificate: &[u8], address: SocketAddr) -> VmNote {
        let runtime_dir = Path::new("/tmp/sempa-1/pvm");
        let mut note = VmNote::new("pvm", runtime_dir, "h2", false, authority_certificate);
        note.summary.hosts = vec![SummaryHost {
            id: HostId::MASTER,
            name: "h1".into(),
            addresses: vec![address],
        }];
        note
    }

    /// A daemon of the virtual machine is recognized. A daemon of another one at the same address
    /// is no answer, and neither is an address where nobody listens.
    #[tokio::test(flavor = "multi_thread")]
    async fn only_daemons_of_the_virtual_machine_answer() {
        let authority = Authority::new("pvm").expect("a key");
        let credentials = authority.issue(HostId::MASTER).expect("a key");
        let (inputs, _input_queue) = mpsc::channel(INPUT_QUEUE_MAX);
        let net = Net::start(
            bind_udp(0).expect("a port"),
            &credentials,
            ("pvm", HostId::MASTER),
            Duration::from_secs(10),
            inputs,
        )
        .expect("TLS");
        let address = SocketAddr::from(([127, 0, 0, 1], net.port().expect("bound")));
        let answered = QueryResult::Answered {
            host: "h1".into(),
            address,
        };
        let own_note = note_about(&credentials.authority_certificate, address);
        assert_eq!(ask_hosts(&own_note).await, answered);
        let silent = QueryResult::Silent {
            hosts: vec!["h1".into()],
        };
        let other_authority = Authority::new("pvm").expect("a key");
        let other_credentials = other_authority.issue(HostId::MASTER).expect("a key");
        let other_note = note_about(&other_credentials.authority_certificate, address);
        assert_eq!(ask_hosts(&other_note).await, silent);
        let unused_port = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        let unused_address = unused_port.local_addr().expect("bound");
        let note = note_about(&credentials.authority_certificate, unused_address);
        assert_eq!(ask_hosts(&note).await, silent);
        assert_eq!(ask_hosts(&note_about(b"x", address)).await, silent);
    }
}
