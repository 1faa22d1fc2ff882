//! Collects facts about other hosts by ssh, as the user who has called this program.

use super::collect::parse_accounts;
use super::facts::{Check, Peer, PeerFacts, UdpFacts};
use super::udp;
use crate::process::run;
use nix::unistd::geteuid;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of hosts that are examined at the same time.
const PARALLEL_HOSTS_MAX: usize = 16;
/// Time limit for a connection, in seconds.
const CONNECT_TIMEOUT_S: u32 = 10;
/// Time limit for the commands on another host.
const REMOTE_TIMEOUT: Duration = Duration::from_secs(40);
/// Maximum length in bytes of the line with the port of the answering side.
const PORT_LINE_BYTES_MAX: u64 = 256;

/// The script that the other host executes. Each line of its output begins with a word; the last
/// line is the time, so that the time is as new as possible when the line arrives.
const SCRIPT: &str = "\
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
admin=$(command -v pvm-admin || command -v \"$OWN\")
if [ -n \"$admin\" ]; then
    echo \"version $(\"$admin\" --version)\"
    if [ \"$(id -u)\" = 0 ]; then run=; else run='sudo -n'; fi
    $run \"$admin\" site-key show --json 2>&1 | head -n 1 | sed 's/^/key /'
fi
getent passwd | sed 's/^/account /'
echo \"time $(date +%s.%N)\"
";

/// Examines all hosts, several at the same time.
pub(super) fn examine(hosts: &[String], port: Option<u16>) -> Vec<Peer> {
    let mut peers = Vec::new();
    for group in hosts.chunks(PARALLEL_HOSTS_MAX) {
        let found: Vec<Peer> = thread::scope(|scope| {
            let threads: Vec<_> = group
                .iter()
                .map(|host| scope.spawn(move || examine_host(host, port)))
                .collect();
            let peers = threads.into_iter().zip(group);
            peers
                .map(|(thread, host)| {
                    thread.join().unwrap_or_else(|_| Peer {
                        name: host.clone(),
                        facts: Err("the examination has crashed".into()),
                    })
                })
                .collect()
        });
        peers.extend(found);
    }
    peers
}

fn examine_host(host: &str, port: Option<u16>) -> Peer {
    let facts = examine_by_ssh(host).map(|mut facts| {
        if facts.version.is_some() {
            facts.udp = Some(test_udp(host, port.unwrap_or(0)));
        }
        facts
    });
    Peer {
        name: host.to_string(),
        facts,
    }
}

/// Returns a command that runs ssh as the user who has called this program, also through sudo: this
/// user's virtual machines use ssh, and not root's.
fn ssh() -> Command {
    let caller = std::env::var_os("SUDO_USER").filter(|_| geteuid().is_root());
    match caller.filter(|user| !user.is_empty() && user != "root") {
        Some(user) => {
            let mut command = Command::new("sudo");
            command
                .args(["-n", "-H", "-u"])
                .arg(user)
                .args(["--", "ssh"]);
            command
        }
        None => Command::new("ssh"),
    }
}

fn ssh_to(host: &str) -> Command {
    let mut command = ssh();
    command.args(["-o", "BatchMode=yes", "-o"]);
    command.arg(format!("ConnectTimeout={CONNECT_TIMEOUT_S}"));
    command.arg("--").arg(host);
    command
}

/// Returns the path of this program in quotes of a shell. Another host may have it there, too.
fn quoted_own_path() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

fn examine_by_ssh(host: &str) -> Result<PeerFacts, String> {
    let mut command = ssh_to(host);
    command.arg("sh -s");
    let script = format!("OWN={}\n{SCRIPT}", quoted_own_path());
    let finished =
        run(command, script.as_bytes(), REMOTE_TIMEOUT).map_err(|error| error.to_string())?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let facts = parse_facts(&finished.stdout, now.unwrap_or_default().as_secs_f64());
    match facts.clock_offset_s {
        Some(_) => Ok(facts),
        None => {
            let line = finished.stderr.lines().last().unwrap_or_default().trim();
            Err(match line {
                "" => format!("ssh ended with {}", finished.status),
                line => line.to_string(),
            })
        }
    }
}

/// Parses the output of [`SCRIPT`], whose last line has arrived at the time `now`.
fn parse_facts(text: &str, now: f64) -> PeerFacts {
    let mut facts = PeerFacts::default();
    let mut accounts = String::new();
    for line in text.lines() {
        let Some((word, rest)) = line.split_once(' ') else {
            continue;
        };
        match word {
            "version" => facts.version = rest.split_whitespace().last().map(str::to_string),
            "key" => facts.site_key = Some(parse_key(rest)),
            "account" => accounts.extend([rest, "\n"]),
            "time" => facts.clock_offset_s = rest.parse().ok().map(|time: f64| time - now),
            _ => {}
        }
    }
    facts.users = parse_accounts(&accounts);
    facts
}

/// Parses the answer of `pvm-admin site-key show --json`.
fn parse_key(line: &str) -> Result<String, String> {
    let value: Option<serde_json::Value> = serde_json::from_str(line).ok();
    let id = value.and_then(|value| Some(value.get("key_id")?.as_str()?.to_string()));
    id.ok_or_else(|| line.to_string())
}

/// Tests datagrams between this host and another one.
fn test_udp(host: &str, port: u16) -> UdpFacts {
    let untested = |why: String| UdpFacts {
        from_here: Check::NotTested(why.clone()),
        from_there: Check::NotTested(why),
    };
    let answering = match AnsweringSide::start(host, port) {
        Ok(answering) => answering,
        Err(why) => return untested(why),
    };
    let addresses = match addresses_of(host, answering.port) {
        Ok(addresses) => addresses,
        Err(why) => return untested(why),
    };
    udp::test(&addresses, port)
}

/// The process on the other host that answers datagrams. Dropping this value ends it.
struct AnsweringSide {
    ssh: Child,
    port: u16,
}

impl AnsweringSide {
    fn start(host: &str, port: u16) -> Result<Self, String> {
        let mut command = ssh_to(host);
        command.arg(format!(
            "PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; \
             \"$(command -v pvm-admin || command -v {})\" probe udp --port {port}",
            quoted_own_path()
        ));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut ssh = command.spawn().map_err(|error| error.to_string())?;
        let output = ssh.stdout.take().map(|pipe| {
            use std::io::Read;
            let mut line = String::new();
            // The other side ends by itself, so the read ends, too.
            let read = BufReader::new(pipe.take(PORT_LINE_BYTES_MAX)).read_line(&mut line);
            read.map(|_| line)
        });
        let line = output.and_then(Result::ok).unwrap_or_default();
        let port = line.trim().strip_prefix("port ").map(str::parse);
        let mut answering = Self { ssh, port: 0 };
        match port {
            Some(Ok(port)) => answering.port = port,
            _ => return Err("the other side does not answer datagrams".into()),
        }
        Ok(answering)
    }
}

impl Drop for AnsweringSide {
    fn drop(&mut self) {
        // The process on the other host ends when its time is over.
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
    }
}

/// Returns the addresses of a host, by the name that ssh uses for it.
fn addresses_of(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let mut command = ssh();
    command.args(["-G", "--"]).arg(host);
    let finished = run(command, b"", REMOTE_TIMEOUT).map_err(|error| error.to_string())?;
    let mut lines = finished.stdout.lines();
    let name = lines.find_map(|line| line.strip_prefix("hostname "));
    let name = name.unwrap_or(host).trim();
    let addresses = (name, port).to_socket_addrs();
    addresses
        .map(Iterator::collect)
        .map_err(|error| format!("{name} has no address: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_another_host_is_parsed() {
        let text = "\
Welcome to the lab
version pvm-admin 0.2.0
key {\"key_id\":\"0123\",\"path\":\"/etc/k\"}
account alice:x:1000:100::/:/bin/sh
account root:x:0:0::/:/bin/sh
time 1000.500000000
";
        let facts = parse_facts(text, 1000.0);
        let expected = PeerFacts {
            version: Some("0.2.0".into()),
            clock_offset_s: Some(0.5),
            users: [("alice".to_string(), 1000)].into(),
            site_key: Some(Ok("0123".into())),
            udp: None,
        };
        assert_eq!(facts, expected);
        assert_eq!(parse_facts("", 5.0), PeerFacts::default());
        assert_eq!(parse_facts("time now\nkey", 5.0), PeerFacts::default());
        let refused = parse_facts("key sudo: a password is required\n", 0.0).site_key;
        assert_eq!(refused, Some(Err("sudo: a password is required".into())));
    }
}
