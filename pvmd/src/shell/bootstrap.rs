//! The two lines exchanged when a master starts a daemon on another host: the master's bootstrap
//! line and the daemon's reply.
//!
//! The lines are sent over the standard input and output of the remote shell. The master's line
//! contains a private key, so it must never appear in arguments or in the environment.

use super::pki::HostCredentials;
use sempa_proto::{HostId, PvmError};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

pub(crate) const BOOTSTRAP_BYTES_MAX: usize = 64 << 10;
/// Protocol version in both lines. Daemons of PVM 3.4.6 send 2316 in this field.
const DAEMON_PROTOCOL_VERSION: u32 = 3000 + sempa_proto::WIRE_VERSION as u32;
/// First word of an error reply.
const ERROR_PREFIX: &str = "sempa-error:";
/// Maximum length of a slave's reply line. The example hosters of PVM read only 255 characters of
/// the line.
pub(crate) const REPLY_BYTES_MAX: usize = 255;

/// The bootstrap line, which the master writes as JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bootstrap {
    pub(crate) ddpro: u32,
    pub(crate) vm: String,
    /// Index of the new host.
    pub(crate) host: u16,
    /// The new host's name in the host table.
    pub(crate) name: String,
    /// Certificate of the authority. This field, `certificate` and `key` contain DER in
    /// hexadecimal.
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
    /// Addresses at which the master listens.
    pub(crate) masters: Vec<SocketAddr>,
    /// The master's library folder. The new host uses the same path if the folder exists there,
    /// too.
    pub(crate) library: Option<String>,
    /// Search path for executables (`ep=`), not expanded.
    pub(crate) search_path: Option<String>,
    /// Working directory (`wd=`), not expanded.
    pub(crate) work_dir: Option<String>,
    /// Relative speed of the host (`sp=`).
    pub(crate) speed: i32,
    /// Debugger command for tasks on the new host (`bx=`).
    pub(crate) debugger: Option<String>,
    /// True if the user has allowed a daemon of root on the master; the new host may then run as
    /// root, too.
    pub(crate) allow_root: bool,
    /// Silence in milliseconds after which a host is considered lost.
    pub(crate) lease_ms: u64,
}

/// Error: the credentials in the master's line cannot be decoded. Nothing was started.
#[derive(Debug, thiserror::Error)]
#[error("the master's line holds a broken certificate")]
pub(crate) struct BrokenCertificate;

impl Bootstrap {
    pub(crate) const VERSION: u32 = DAEMON_PROTOCOL_VERSION;

    /// Decodes the credentials in the line and returns them.
    ///
    /// # Errors
    /// A credential is not hexadecimal.
    pub(crate) fn credentials(&self) -> Result<HostCredentials, BrokenCertificate> {
        let decode_hex = |text: &str| from_hex(text).ok_or(BrokenCertificate);
        Ok(HostCredentials {
            authority_certificate: decode_hex(&self.authority)?,
            certificate: decode_hex(&self.certificate)?,
            key: decode_hex(&self.key)?,
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
    /// The line is malformed or has another version. The error is the refusal that the slave must
    /// send as its reply.
    pub(crate) fn parse(line: &str) -> Result<Self, Refusal> {
        // The version is read first, because another version may have other fields.
        #[derive(Deserialize)]
        struct Version {
            ddpro: u32,
        }
        let malformed_refusal = |e: serde_json::Error| Refusal {
            error: PvmError::CantStart,
            text: format!("standard input did not bring the line that a master sends: {e}"),
        };
        let version: Version = serde_json::from_str(line).map_err(malformed_refusal)?;
        if version.ddpro != DAEMON_PROTOCOL_VERSION {
            let text = format!(
                "the master uses protocol version {}, this daemon {DAEMON_PROTOCOL_VERSION}: install one version",
                version.ddpro
            );
            return Err(Refusal {
                error: PvmError::BadVersion,
                text,
            });
        }
        serde_json::from_str(line).map_err(malformed_refusal)
    }
}

/// A slave's reply if it is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadyReply {
    pub(crate) arch: String,
    /// PVM data signature of the host.
    pub(crate) dsig: i32,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// A slave's reply if it cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) error: PvmError,
    /// The reason in one sentence.
    pub(crate) text: String,
}

/// Formats a reply as a line without newline. The line begins as PVM's reply does, because hosters
/// written for PVM look for this beginning. Addresses that would make the line too long are
/// omitted.
pub(crate) fn reply_line(reply: &Result<ReadyReply, Refusal>) -> String {
    match reply {
        Ok(ready_reply) => {
            let hex_address = match ready_reply.addresses.first() {
                Some(SocketAddr::V4(v4)) => {
                    format!("{:08x}:{:04x}", u32::from(*v4.ip()), v4.port())
                }
                Some(SocketAddr::V6(v6)) => format!("00000000:{:04x}", v6.port()),
                None => "00000000:0000".into(),
            };
            let mut line = format!(
                "ddpro<{DAEMON_PROTOCOL_VERSION}> arch<{}> ip<{hex_address}> mtu<4080> dsig<{}>",
                ready_reply.arch, ready_reply.dsig
            );
            let mut address_list = String::new();
            for address in &ready_reply.addresses {
                let address_text = address.to_string();
                if line.len() + address_list.len() + address_text.len() + " sempa<,>".len()
                    > REPLY_BYTES_MAX
                {
                    break;
                }
                address_list.push_str(if address_list.is_empty() { "" } else { "," });
                address_list.push_str(&address_text);
            }
            line.push_str(&format!(" sempa<{address_list}>"));
            line
        }
        Err(refusal) => format!(
            "{ERROR_PREFIX} {} {}",
            refusal.error.code(),
            refusal.text.replace('\n', " / ")
        ),
    }
}

/// Parses a line of a slave's output. Returns the reply; a malformed reply or a reply of another
/// version is returned as a refusal. Returns `None` if the line is not a reply, for example a
/// greeting of the login shell.
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
    let field_value = |name: &str| {
        let start = line.find(&format!("{name}<"))? + name.len() + 1;
        line[start..].split_once('>').map(|(value, _)| value)
    };
    let parse_ready = || {
        let addresses = field_value("sempa")?
            .split(',')
            .filter_map(|a| a.parse().ok())
            .collect();
        Some(ReadyReply {
            arch: field_value("arch")?.to_string(),
            dsig: field_value("dsig")?.parse().ok()?,
            addresses,
        })
    };
    let version = field_value("ddpro").unwrap_or_default();
    if version != DAEMON_PROTOCOL_VERSION.to_string() {
        let text = format!(
            "the daemon there is of version {version}, this one of version {DAEMON_PROTOCOL_VERSION}: install one version"
        );
        return Some(Err(Refusal {
            error: PvmError::BadVersion,
            text,
        }));
    }
    let malformed_refusal = || Refusal {
        error: PvmError::CantStart,
        text: format!("the daemon there answered {line:?}"),
    };
    Some(parse_ready().ok_or_else(malformed_refusal))
}

/// Returns the host for which the line was written.
///
/// # Errors
/// The line contains no valid host index.
pub(crate) fn host_from_bootstrap(bootstrap: &Bootstrap) -> Result<HostId, Refusal> {
    HostId::new(bootstrap.host).ok_or_else(|| Refusal {
        error: PvmError::BadParam,
        text: format!(
            "the master gave host index {}, which does not exist",
            bootstrap.host
        ),
    })
}

pub(crate) fn encode_hex(bytes: &[u8]) -> String {
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
            authority: encode_hex(&[1, 255]),
            certificate: encode_hex(&[]),
            key: encode_hex(&[7]),
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
        let parsed_bootstrap =
            Bootstrap::parse(line.trim_end()).unwrap_or_else(|r| panic!("{}", r.text));
        assert!(
            parsed_bootstrap == bootstrap
                && parsed_bootstrap
                    .credentials()
                    .expect("hexadecimal")
                    .authority_certificate
                    == [1, 255]
        );
        let other_version_line = line.replacen(&DAEMON_PROTOCOL_VERSION.to_string(), "9999", 1);
        assert_eq!(
            Bootstrap::parse(&other_version_line).err().map(|r| r.error),
            Some(PvmError::BadVersion)
        );

        let ready_reply = ReadyReply {
            arch: "LINUX64".into(),
            dsig: 4230209,
            addresses: vec!["10.0.0.2:77".parse().expect("an address")],
        };
        let line = reply_line(&Ok(ready_reply.clone()));
        let expected_start = format!(
            "ddpro<{DAEMON_PROTOCOL_VERSION}> arch<LINUX64> ip<0a000002:004d> mtu<4080> dsig<4230209>"
        );
        assert!(line.starts_with(&expected_start), "{line}");
        assert_eq!(parse_reply(&line), Some(Ok(ready_reply)));
        let refusal = Refusal {
            error: PvmError::DupHost,
            text: "one runs here".into(),
        };
        assert_eq!(
            parse_reply(&reply_line(&Err(refusal.clone()))),
            Some(Err(refusal))
        );
    }

    /// A greeting yields no reply. A reply of PVM 3 is refused because of its version. A reply
    /// whose list of addresses is too long is truncated.
    #[test]
    fn unrelated_and_old_lines_are_not_replies() {
        assert_eq!(parse_reply("Welcome to this machine"), None);
        let pvm3_reply =
            parse_reply("ddpro<2316> arch<LINUX64> ip<0a4e0002:9c2a> mtu<4080> dsig<4230209>");
        assert_eq!(
            pvm3_reply.and_then(Result::err).map(|r| r.error),
            Some(PvmError::BadVersion)
        );
        let addresses = vec![
            "[2001:db8:1111:2222:3333:4444:5555:6666]:65535"
                .parse()
                .expect("an address");
            9
        ];
        let line = reply_line(&Ok(ReadyReply {
            arch: "LINUX64".into(),
            dsig: 4230209,
            addresses,
        }));
        assert!(line.len() <= REPLY_BYTES_MAX);
    }
}
