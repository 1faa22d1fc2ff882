//! The two lines exchanged when a master starts a daemon on another host: the master's bootstrap
//! line and the daemon's reply.
//!
//! They travel over the standard input and output of the remote shell. The master's line contains a
//! private key, so it must never appear in arguments or in the environment.

use super::pki::HostCredentials;
use sempa_proto::{HostId, PvmError};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

pub(crate) const BOOTSTRAP_BYTES_MAX: usize = 64 << 10;
/// Version of both lines. PVM 3.4.6 daemons have 2316 in the same field.
const DAEMON_PROTOCOL: u32 = 3000 + sempa_proto::WIRE_VERSION as u32;
/// First word of an error reply.
const ERROR_PREFIX: &str = "sempa-error:";
/// Longest reply line of a slave (example hosters keep 255 characters of it).
pub(crate) const REPLY_BYTES_MAX: usize = 255;

/// The bootstrap line that the master writes, as JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bootstrap {
    pub(crate) ddpro: u32,
    pub(crate) vm: String,
    /// Index of the new host.
    pub(crate) host: u16,
    /// The new host's name in the host table.
    pub(crate) name: String,
    /// Certificate of the authority. As in the next two fields, DER in hexadecimal.
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
    /// Addresses at which the master listens.
    pub(crate) masters: Vec<SocketAddr>,
    /// The master's library folder, used on the new host if it exists on that host.
    pub(crate) library: Option<String>,
    /// Search path for executables (`ep=`), not expanded.
    pub(crate) search_path: Option<String>,
    /// Working directory (`wd=`), not expanded.
    pub(crate) work_dir: Option<String>,
    /// Relative speed of the host (`sp=`).
    pub(crate) speed: i32,
    /// Debugger command for tasks on the new host (`bx=`).
    pub(crate) debugger: Option<String>,
    /// True if the user has allowed root on the master; the permission applies to the new host,
    /// too.
    pub(crate) allow_root: bool,
    /// Silence in milliseconds after which a host is considered lost.
    pub(crate) lease_ms: u64,
}

/// The credentials in the master's line cannot be decoded. Nothing was started.
#[derive(Debug, thiserror::Error)]
#[error("the master's line holds a broken certificate")]
pub(crate) struct BrokenCertificate;

impl Bootstrap {
    pub(crate) const VERSION: u32 = DAEMON_PROTOCOL;

    /// Returns the credentials in the line.
    ///
    /// # Errors
    /// They are not hexadecimal.
    pub(crate) fn credentials(&self) -> Result<HostCredentials, BrokenCertificate> {
        let part = |text: &str| from_hex(text).ok_or(BrokenCertificate);
        Ok(HostCredentials {
            authority_certificate: part(&self.authority)?,
            certificate: part(&self.certificate)?,
            key: part(&self.key)?,
        })
    }

    /// Returns the line, newline included.
    pub(crate) fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("strings and numbers are JSON");
        line.push('\n');
        line
    }

    /// Parses the master's line.
    ///
    /// # Errors
    /// The refusal to send as the reply, if the line is malformed or has another version.
    pub(crate) fn parse(line: &str) -> Result<Bootstrap, Refusal> {
        // The version is read first: all other fields may change with it.
        #[derive(Deserialize)]
        struct Version {
            ddpro: u32,
        }
        let bad = |e: serde_json::Error| Refusal {
            error: PvmError::CantStart,
            text: format!("standard input did not bring the line that a master sends: {e}"),
        };
        let version: Version = serde_json::from_str(line).map_err(bad)?;
        if version.ddpro != DAEMON_PROTOCOL {
            let text = format!(
                "the master uses protocol version {}, this daemon {DAEMON_PROTOCOL}: install one version",
                version.ddpro
            );
            return Err(Refusal {
                error: PvmError::BadVersion,
                text,
            });
        }
        serde_json::from_str(line).map_err(bad)
    }
}

/// A slave's reply when it is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadyReply {
    pub(crate) arch: String,
    /// PVM data signature of the host.
    pub(crate) dsig: i32,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// A slave's reply when it cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) error: PvmError,
    /// The reason in one sentence.
    pub(crate) text: String,
}

/// Formats a reply as a line without newline. The line begins as PVM's does, because hosters
/// written for PVM look for this beginning.
pub(crate) fn reply_line(reply: &Result<ReadyReply, Refusal>) -> String {
    match reply {
        Ok(ready) => {
            let ip = match ready.addresses.first() {
                Some(SocketAddr::V4(v4)) => {
                    format!("{:08x}:{:04x}", u32::from(*v4.ip()), v4.port())
                }
                Some(SocketAddr::V6(v6)) => format!("00000000:{:04x}", v6.port()),
                None => "00000000:0000".into(),
            };
            let mut line = format!(
                "ddpro<{DAEMON_PROTOCOL}> arch<{}> ip<{ip}> mtu<4080> dsig<{}>",
                ready.arch, ready.dsig
            );
            let mut list = String::new();
            for address in &ready.addresses {
                let word = address.to_string();
                if line.len() + list.len() + word.len() + " sempa<,>".len() > REPLY_BYTES_MAX {
                    break;
                }
                list.push_str(if list.is_empty() { "" } else { "," });
                list.push_str(&word);
            }
            line.push_str(&format!(" sempa<{list}>"));
            line
        }
        Err(refusal) => format!(
            "{ERROR_PREFIX} {} {}",
            refusal.error.code(),
            refusal.text.replace('\n', " / ")
        ),
    }
}

/// Parses a slave's reply. Returns `None` for other lines, such as a greeting of the login shell.
pub(crate) fn parse_reply(line: &str) -> Option<Result<ReadyReply, Refusal>> {
    if let Some(rest) = line.strip_prefix(ERROR_PREFIX) {
        let (code, text) = rest.trim().split_once(' ')?;
        let error = code
            .parse()
            .ok()
            .and_then(PvmError::from_code)
            .unwrap_or(PvmError::CantStart);
        return Some(Err(Refusal {
            error,
            text: text.to_string(),
        }));
    }
    if !line.starts_with("ddpro<") {
        return None;
    }
    let field = |name: &str| {
        let start = line.find(&format!("{name}<"))? + name.len() + 1;
        line[start..].split_once('>').map(|(value, _)| value)
    };
    let ready = || {
        let addresses = field("sempa")?
            .split(',')
            .filter_map(|a| a.parse().ok())
            .collect();
        Some(ReadyReply {
            arch: field("arch")?.to_string(),
            dsig: field("dsig")?.parse().ok()?,
            addresses,
        })
    };
    let version = field("ddpro").unwrap_or_default();
    if version != DAEMON_PROTOCOL.to_string() {
        let text = format!(
            "the daemon there is of version {version}, this one of version {DAEMON_PROTOCOL}: install one version"
        );
        return Some(Err(Refusal {
            error: PvmError::BadVersion,
            text,
        }));
    }
    let broken = || Refusal {
        error: PvmError::CantStart,
        text: format!("the daemon there answered {line:?}"),
    };
    Some(ready().ok_or_else(broken))
}

/// Returns the host that the line is for.
pub(crate) fn host_of(bootstrap: &Bootstrap) -> Result<HostId, Refusal> {
    HostId::new(bootstrap.host).ok_or_else(|| Refusal {
        error: PvmError::BadParam,
        text: format!(
            "the master gave host index {}, which does not exist",
            bootstrap.host
        ),
    })
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines_survive_a_round_trip() {
        let bootstrap = Bootstrap {
            ddpro: Bootstrap::VERSION,
            vm: "pvm".into(),
            host: 2,
            name: "h2".into(),
            authority: to_hex(&[1, 255]),
            certificate: to_hex(&[]),
            key: to_hex(&[7]),
            masters: vec!["10.0.0.1:9".parse().expect("an address")],
            library: None,
            search_path: Some("$HOME/x".into()),
            work_dir: None,
            speed: 1000,
            debugger: None,
            allow_root: true,
            lease_ms: 10_000,
        };
        let line = bootstrap.to_line();
        assert_eq!(line.matches('\n').count(), 1);
        let again = Bootstrap::parse(line.trim_end()).unwrap_or_else(|r| panic!("{}", r.text));
        assert!(
            again == bootstrap
                && again
                    .credentials()
                    .expect("hexadecimal")
                    .authority_certificate
                    == [1, 255]
        );
        let other = line.replacen(&DAEMON_PROTOCOL.to_string(), "9999", 1);
        assert_eq!(
            Bootstrap::parse(&other).err().map(|r| r.error),
            Some(PvmError::BadVersion)
        );

        let ready = ReadyReply {
            arch: "LINUX64".into(),
            dsig: 4230209,
            addresses: vec!["10.0.0.2:77".parse().expect("an address")],
        };
        let line = reply_line(&Ok(ready.clone()));
        let begin = format!(
            "ddpro<{DAEMON_PROTOCOL}> arch<LINUX64> ip<0a000002:004d> mtu<4080> dsig<4230209>"
        );
        assert!(line.starts_with(&begin), "{line}");
        assert_eq!(parse_reply(&line), Some(Ok(ready)));
        let refusal = Refusal {
            error: PvmError::DupHost,
            text: "one runs here".into(),
        };
        assert_eq!(
            parse_reply(&reply_line(&Err(refusal.clone()))),
            Some(Err(refusal))
        );
    }

    /// Greetings are ignored, PVM 3 replies are refused by version, and a long address list is cut
    /// to the limit.
    #[test]
    fn unrelated_and_old_lines_are_not_replies() {
        assert_eq!(parse_reply("Welcome to this machine"), None);
        let old =
            parse_reply("ddpro<2316> arch<LINUX64> ip<0a4e0002:9c2a> mtu<4080> dsig<4230209>");
        assert_eq!(
            old.and_then(Result::err).map(|r| r.error),
            Some(PvmError::BadVersion)
        );
        let many = vec![
            "[2001:db8:1111:2222:3333:4444:5555:6666]:65535"
                .parse()
                .expect("an address");
            9
        ];
        let line = reply_line(&Ok(ReadyReply {
            arch: "LINUX64".into(),
            dsig: 4230209,
            addresses: many,
        }));
        assert!(line.len() <= REPLY_BYTES_MAX);
    }
}
