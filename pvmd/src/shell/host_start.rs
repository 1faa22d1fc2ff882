//! Starts daemons on other hosts through a remote shell, as PVM does: `$PVM_RSH host [-l user]
//! command`.
//!
//! The bootstrap line is written to the new daemon's standard input, and the new daemon replies
//! with one line. Hosts can also be started by a hoster or by a person at the master's terminal. In
//! these two cases the new daemon requests its bootstrap line from the master (see
//! `sealed_bootstrap`).

use super::bootstrap::{Bootstrap, ReadyReply, Refusal, encode_hex, parse_reply};
use super::input::{Input, InputSender};
use super::manual_start;
use super::pki::{Authority, PkiError};
use super::sealed_bootstrap::{self, BootstrapSecret};
use super::ssh::SshCommand;
use super::sys::OpenFilesLimit;
use pvmd_machine::io::{Event, HostPlan, HosterOrder, StartId, StartedHost};
use sempa_proto::PvmError;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Maximum number of hosts that are started concurrently; further starts wait.
const CONCURRENT_STARTS_MAX: usize = 32;
/// Time limit for the start of one host, as in PVM.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which the bootstrap line is offered to a daemon that a hoster must start.
const OFFER_TIMEOUT: Duration = Duration::from_secs(180);
/// Time for which the bootstrap line is offered to a daemon that a person must start.
const MANUAL_OFFER_TIMEOUT: Duration = Duration::from_secs(900);
/// Time limit for the remote shell to end after the daemon's reply.
const SHELL_EXIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of bytes read from the output of a remote shell.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of lines of standard error that are stored for the error message.
const STDERR_LINES_MAX: usize = 20;
/// Start of the line in which the remote command names the daemon that PATH finds.
const FOUND_DAEMON_MARK: &str = "pvmd in PATH:";
/// Starts of lines that the daemon of PVM 3.4 writes to its standard error: log lines, and its
/// refusal to run as root.
const FOREIGN_DAEMON_STARTS: [&str; 2] = ["[pvmd pid", "*** Error: PVM is being run as user"];

/// Settings that apply to all hosts started by this master.
pub(crate) struct HostStarterSettings {
    /// Issues the new hosts' certificates.
    pub(crate) authority: Arc<Authority>,
    pub(crate) vm: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) library: Option<PathBuf>,
    /// True if the user allowed this virtual machine to run as root.
    pub(crate) allow_root: bool,
    /// Duration of silence after which a host is considered lost.
    pub(crate) lease: Duration,
    /// The limit of open files that the remote shell gets.
    pub(crate) files_limit: OpenFilesLimit,
    /// Remote shell command from `PVM_RSH`, if set.
    pub(crate) remote_shell: Option<String>,
    /// The remote shell that is used if `PVM_RSH` is not set.
    pub(crate) ssh: SshCommand,
    /// Daemon command from `PVM_DPATH`, if set.
    pub(crate) daemon_command: Option<String>,
    /// Path of this program. On other hosts, this path is tried first.
    pub(crate) program: PathBuf,
}

/// All host starts in progress. Owned by the daemon's loop.
pub(crate) struct HostStarter {
    settings: Option<Arc<HostStarterSettings>>,
    start_permits: Arc<Semaphore>,
    /// The lock is held by the start that asks a person at the terminal.
    terminal_lock: Arc<Mutex<()>>,
    inputs: InputSender,
    running_starts: HashMap<StartId, AbortHandle>,
}

impl HostStarter {
    /// Creates a starter. If `settings` is `None` (on a slave), every start fails.
    pub(crate) fn new(settings: Option<HostStarterSettings>, inputs: InputSender) -> Self {
        let start_permits = Arc::new(Semaphore::new(CONCURRENT_STARTS_MAX));
        let terminal_lock = Arc::new(Mutex::new(()));
        Self {
            settings: settings.map(Arc::new),
            start_permits,
            terminal_lock,
            inputs,
            running_starts: HashMap::new(),
        }
    }

    /// Starts a daemon. Reports [`Event::HostStarted`].
    pub(crate) fn start(&mut self, start: StartId, plan: HostPlan) {
        self.running_starts.retain(|_, task| !task.is_finished());
        let (settings, start_permits, terminal_lock) = (
            self.settings.clone(),
            self.start_permits.clone(),
            self.terminal_lock.clone(),
        );
        let inputs = self.inputs.clone();
        let task = tokio::spawn(async move {
            let result = match settings {
                None => Err((
                    PvmError::NotImpl,
                    "only the master starts daemons".to_string(),
                )),
                Some(settings) => {
                    let attempt = HostStart {
                        settings: &settings,
                        plan: &plan,
                    };
                    let reply = if plan.is_manual() {
                        attempt.run_manually(&terminal_lock).await
                    } else {
                        let _permit = start_permits.acquire().await;
                        attempt.run_remote_shell().await
                    };
                    reply.map_err(|refusal| (refusal.error, attempt.describe_refusal(&refusal)))
                }
            };
            let result = result.map(|reply| StartedHost {
                arch: reply.arch,
                dsig: reply.dsig,
                addresses: reply.addresses,
            });
            let _ = inputs
                .send(Input::Event(Event::HostStarted { start, result }))
                .await;
        });
        self.running_starts.insert(start, task.abort_handle());
    }

    /// Prepares starts by a hoster. Reports [`Event::HostsPrepared`] with the orders for the
    /// hoster. This daemon offers each bootstrap line until the attempt ends or a time limit is
    /// reached.
    pub(crate) fn prepare_for_hoster(&mut self, plans: Vec<(StartId, HostPlan)>) {
        let (settings, inputs) = (self.settings.clone(), self.inputs.clone());
        let (order_sender, order_receiver) = tokio::sync::mpsc::unbounded_channel();
        let plan_count = plans.len();
        for (start, plan) in plans {
            let (settings, order_sender) = (settings.clone(), order_sender.clone());
            let task = tokio::spawn(async move {
                let start_error = |text: String| (PvmError::CantStart, text);
                let Some(settings) = settings else {
                    let _ = order_sender.send((
                        start,
                        Err(start_error("only the master starts daemons".into())),
                    ));
                    return;
                };
                let attempt = HostStart {
                    settings: &settings,
                    plan: &plan,
                };
                let offer = attempt.create_offer().await;
                let sealed = offer.map_err(|text| {
                    start_error(format!("cannot start a daemon on {}: {text}", plan.name))
                });
                match sealed {
                    Ok((order, listener, sealed)) => {
                        let _ = order_sender.send((start, Ok(order)));
                        // This time is an upper bound: the state machine usually ends the attempt
                        // earlier.
                        let offer_timeout = if plan.is_manual() {
                            MANUAL_OFFER_TIMEOUT
                        } else {
                            OFFER_TIMEOUT
                        };
                        let _ = timeout(
                            offer_timeout,
                            sealed_bootstrap::serve_sealed(listener, sealed),
                        )
                        .await;
                    }
                    Err(refusal) => drop(order_sender.send((start, Err(refusal)))),
                }
            });
            self.running_starts.insert(start, task.abort_handle());
        }
        drop(order_sender);
        tokio::spawn(async move {
            let (mut order_receiver, mut orders) = (order_receiver, Vec::with_capacity(plan_count));
            while orders.len() < plan_count
                && let Some(order) = order_receiver.recv().await
            {
                orders.push(order);
            }
            let _ = inputs
                .send(Input::Event(Event::HostsPrepared { orders }))
                .await;
        });
    }

    /// Ends an attempt. `line` is the reply of the started daemon, as the hoster received it, or an
    /// error name of the hoster. Returns the event for the state machine.
    pub(crate) fn on_hoster_reply(&mut self, start: StartId, line: &str) -> Event {
        self.abort_start(start);
        let line = line.trim_end();
        let result = parse_reply(line).unwrap_or_else(|| {
            let error = PvmError::from_name(line).unwrap_or(PvmError::CantStart);
            Err(Refusal {
                error,
                text: format!("the hoster replied {line:?}"),
            })
        });
        let result = result
            .map(|ready_reply| StartedHost {
                arch: ready_reply.arch,
                dsig: ready_reply.dsig,
                addresses: ready_reply.addresses,
            })
            .map_err(|refusal| (refusal.error, refusal.text));
        Event::HostStarted { start, result }
    }

    /// Aborts an attempt to start a daemon. The remote shell of the attempt is killed.
    pub(crate) fn abort_start(&mut self, start: StartId) {
        if let Some(task) = self.running_starts.remove(&start) {
            task.abort();
        }
    }
}

struct HostStart<'a> {
    settings: &'a HostStarterSettings,
    plan: &'a HostPlan,
}

impl HostStart<'_> {
    fn describe_refusal(&self, refusal: &Refusal) -> String {
        format!(
            "cannot start a daemon on {}: {}",
            self.plan.name, refusal.text
        )
    }

    async fn run_remote_shell(&self) -> Result<ReadyReply, Refusal> {
        let start_refusal = |text: String| Refusal {
            error: PvmError::CantStart,
            text,
        };
        let command_words = self.command_line().await.map_err(start_refusal)?;
        let bootstrap = self
            .build_bootstrap()
            .map_err(|e| start_refusal(e.to_string()))?;
        let bootstrap_line = bootstrap.to_line();
        let mut command = Command::new(&command_words[0]);
        self.settings.files_limit.apply_to(command.as_std_mut());
        let mut child = command
            .args(&command_words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| {
                start_refusal(format!(
                    "the remote shell {} cannot be executed: {e}; set PVM_RSH to another one",
                    command_words[0]
                ))
            })?;
        match timeout(
            START_TIMEOUT,
            self.exchange_bootstrap(&mut child, &bootstrap_line),
        )
        .await
        {
            Ok(Ok(ready_reply)) => {
                // The daemon no longer belongs to the shell's session, so the remote shell ends
                // soon.
                tokio::spawn(
                    async move { timeout(SHELL_EXIT_TIMEOUT, child.wait()).await.is_ok() },
                );
                Ok(ready_reply)
            }
            Ok(Err(refusal)) => Err(refusal),
            Err(_) => Err(start_refusal(format!(
                "giving up after {} s without an answer: try '{}', which must end at once and ask for nothing",
                START_TIMEOUT.as_secs(),
                self.trial_command()
            ))),
        }
    }

    /// Asks a person at the master's terminal to start the daemon, and waits for the daemon's
    /// reply.
    async fn run_manually(&self, terminal_lock: &Mutex<()>) -> Result<ReadyReply, Refusal> {
        let start_refusal = |text: String| Refusal {
            error: PvmError::CantStart,
            text,
        };
        manual_start::check_person_reachable()?;
        let _terminal_guard = terminal_lock.lock().await;
        let (order, listener, sealed_line) = self.create_offer().await.map_err(start_refusal)?;
        tokio::select! {
            answer = manual_start::ask_for_start(&order) => answer,
            () = sealed_bootstrap::serve_sealed(listener, sealed_line) => Err(start_refusal("the TCP port for it has failed".into())),
        }
    }

    /// Creates an order for a hoster or a person. Returns the order, the listener for the new
    /// daemon, and the encrypted bootstrap line.
    async fn create_offer(&self) -> Result<(HosterOrder, TcpListener, Vec<u8>), String> {
        let secret = BootstrapSecret::new();
        let bootstrap = self.build_bootstrap().map_err(|e| e.to_string())?;
        let sealed_line = secret.seal(&bootstrap.to_line());
        let listener = sealed_bootstrap::listen_any()
            .await
            .map_err(|e| format!("cannot open a TCP port for it: {e}"))?;
        let port = listener
            .local_addr()
            .map_err(|e| format!("cannot open a TCP port for it: {e}"))?
            .port();
        let join_option = format!(
            " --join {}",
            sealed_bootstrap::address_list(&self.settings.addresses, port)
        );
        let contact = &self.plan.contact;
        let login = self
            .plan
            .login
            .as_ref()
            .map_or_else(|| contact.clone(), |user| format!("{user}@{contact}"));
        Ok((
            HosterOrder {
                login,
                command: self.remote_command(&join_option),
                secret: secret.to_hex_text(),
            },
            listener,
            sealed_line,
        ))
    }

    /// Returns the command line of the remote shell.
    async fn command_line(&self) -> Result<Vec<String>, String> {
        if self.plan.contact.starts_with('-') || self.plan.contact.is_empty() {
            return Err(format!(
                "{:?} cannot be the name of a host",
                self.plan.contact
            ));
        }
        let mut words = match &self.settings.remote_shell {
            Some(shell) => shell_words::split(shell)
                .map_err(|e| format!("PVM_RSH={shell:?} cannot be split into words: {e}"))?,
            None => {
                self.settings
                    .ssh
                    .command_words(&self.plan.contact, self.plan.login.as_deref())
                    .await
            }
        };
        if words.is_empty() {
            return Err("PVM_RSH is empty: unset it or set it to a remote shell".into());
        }
        words.push(self.plan.contact.clone());
        if let Some(login) = &self.plan.login {
            words.extend(["-l".to_string(), login.clone()]);
        }
        words.push(self.remote_command(""));
        Ok(words)
    }

    /// Returns a command with which the user can check by hand that the remote shell reaches the
    /// host.
    fn trial_command(&self) -> String {
        let remote_shell = self.settings.remote_shell.as_deref();
        trial_command(remote_shell, &self.plan.contact, self.plan.login.as_deref())
    }

    /// Returns the command that starts the daemon on the remote host. If the user has set a
    /// command, returns this command with the options. Otherwise returns a script: the script runs
    /// the path of this program if the path exists on the remote host, or else `pvmd` from the
    /// search path. For a person, returns only the path with the options, because the script would
    /// be long to type.
    fn remote_command(&self, extra_options: &str) -> String {
        let is_manual = self.plan.is_manual();
        let slave_option = if is_manual { "-S" } else { "-s" };
        if let Some(command) = self
            .plan
            .command
            .as_ref()
            .or(self.settings.daemon_command.as_ref())
        {
            return format!("{command} {slave_option}{extra_options}");
        }
        let quoted_program = self.settings.program.to_string_lossy();
        let quoted_program = shell_words::quote(&quoted_program);
        if is_manual {
            return format!("{quoted_program} {slave_option}{extra_options}");
        }
        let script = format!(
            "if [ -x {quoted_program} ]; then exec {quoted_program} -s{extra_options}; else \
             echo {FOUND_DAEMON_MARK} \"$(command -v pvmd)\" >&2; exec pvmd -s{extra_options}; fi"
        );
        format!("sh -c {}", shell_words::quote(&script))
    }

    fn build_bootstrap(&self) -> Result<Bootstrap, PkiError> {
        let credentials = self.settings.authority.issue(self.plan.id)?;
        Ok(Bootstrap {
            ddpro: Bootstrap::VERSION,
            vm: self.settings.vm.clone(),
            host: self.plan.id.index(),
            name: self.plan.name.clone(),
            authority: encode_hex(&credentials.authority_certificate),
            certificate: encode_hex(&credentials.certificate),
            key: encode_hex(&credentials.key),
            masters: self.settings.addresses.clone(),
            library: self
                .settings
                .library
                .as_ref()
                .map(|l| l.to_string_lossy().into_owned()),
            search_path: self.plan.search_path.clone(),
            work_dir: self.plan.work_dir.clone(),
            speed: self.plan.speed,
            debugger: self.plan.debugger.clone(),
            allow_root: self.settings.allow_root,
            lease_ms: u64::try_from(self.settings.lease.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Writes the bootstrap line and waits for the reply. If no reply arrives, reads the output to
    /// its end and returns the reason of the failure.
    async fn exchange_bootstrap(
        &self,
        child: &mut Child,
        bootstrap_line: &str,
    ) -> Result<ReadyReply, Refusal> {
        let mut stdin = child.stdin.take().expect("it is a pipe");
        let stdout = child.stdout.take().expect("it is a pipe");
        let stderr = child.stderr.take().expect("it is a pipe");
        let write_line = async {
            // If a remote shell ends without reading, its standard error contains the reason.
            let _ = stdin.write_all(bootstrap_line.as_bytes()).await;
            drop(stdin);
        };
        let read_reply = async {
            let mut lines = BufReader::new(stdout.take(OUTPUT_BYTES_MAX)).split(b'\n');
            while let Ok(Some(bootstrap_line)) = lines.next_segment().await {
                let bootstrap_line = String::from_utf8_lossy(&bootstrap_line);
                if let Some(reply) = parse_reply(bootstrap_line.trim_end()) {
                    return Some(reply);
                }
                tracing::info!("stdout@{}: {}", self.plan.name, bootstrap_line.trim_end());
            }
            None
        };
        let stderr_future = async {
            let mut last_lines = VecDeque::new();
            let mut lines = BufReader::new(stderr.take(OUTPUT_BYTES_MAX)).split(b'\n');
            while let Ok(Some(bootstrap_line)) = lines.next_segment().await {
                let bootstrap_line = String::from_utf8_lossy(&bootstrap_line).trim().to_string();
                if bootstrap_line.is_empty() {
                    continue;
                }
                tracing::info!("stderr@{}: {bootstrap_line}", self.plan.name);
                last_lines.push_back(bootstrap_line);
                if last_lines.len() > STDERR_LINES_MAX {
                    last_lines.pop_front();
                }
            }
            last_lines
        };
        let mut stderr_future = std::pin::pin!(stderr_future);
        let mut stderr_lines = None;
        let mut reply_future = std::pin::pin!(async { tokio::join!(write_line, read_reply).1 });
        let reply = loop {
            tokio::select! {
                reply = &mut reply_future => break reply,
                lines = &mut stderr_future, if stderr_lines.is_none() => stderr_lines = Some(lines),
            }
        };
        if let Some(reply) = reply {
            return reply;
        }
        let stderr_lines = match stderr_lines {
            Some(stderr_lines) => stderr_lines,
            None => stderr_future.await,
        };
        let exit_code = child.wait().await.ok().and_then(|s| s.code());
        Err(self.failure_reason(&stderr_lines, exit_code))
    }

    fn foreign_daemon_reason(&self, stderr_lines: &VecDeque<String>) -> Option<String> {
        let set_command = self.plan.command.as_deref();
        let set_command = set_command.or(self.settings.daemon_command.as_deref());
        foreign_daemon_reason(stderr_lines, set_command, &self.settings.program)
    }

    /// Determines the reason of a failure from the remote shell's standard error and its exit
    /// status. The status `None` means that a signal ended the shell.
    fn failure_reason(&self, stderr_lines: &VecDeque<String>, status: Option<i32>) -> Refusal {
        let last_line = stderr_lines.back().map_or("no output", String::as_str);
        let unknown_host_phrases = [
            "could not resolve hostname",
            "name or service not known",
            "unknown host",
            "no address associated",
        ];
        let stderr_contains_any = |words: &[&str]| {
            stderr_lines
                .iter()
                .any(|l| words.iter().any(|w| l.to_ascii_lowercase().contains(w)))
        };
        let (error, error_meaning) = if stderr_contains_any(&unknown_host_phrases) {
            (
                PvmError::NoHost,
                "the host is unknown: check its name, or give its address with ip=".to_string(),
            )
        } else if let Some(reason) = self.foreign_daemon_reason(stderr_lines) {
            return Refusal {
                error: PvmError::CantStart,
                text: reason,
            };
        } else if status == Some(127) || stderr_contains_any(&["not found", "no such file"]) {
            (
                PvmError::CantStart,
                "pvmd was not found there: install it, or name it with dx= or PVM_DPATH"
                    .to_string(),
            )
        } else if status == Some(255) {
            (
                PvmError::CantStart,
                format!(
                    "the remote shell could not reach the host: try '{}', which must ask for nothing and print nothing, \
                     or set PVM_RSH",
                    self.trial_command()
                ),
            )
        } else {
            (
                PvmError::CantStart,
                "the daemon there did not start".to_string(),
            )
        };
        let status = status.map_or("a signal".to_string(), |code| format!("status {code}"));
        Refusal {
            error,
            text: format!(
                "{error_meaning} (the remote shell ended with {status}; last line of its standard error: {last_line})"
            ),
        }
    }
}

/// Returns the reason of a failure if the remote shell has started the daemon of another PVM;
/// otherwise `None`. `set_command` is the daemon's command that the user has set, `own_program` the
/// path of this program.
fn foreign_daemon_reason(
    stderr_lines: &VecDeque<String>,
    set_command: Option<&str>,
    own_program: &Path,
) -> Option<String> {
    let is_foreign_line = |line: &String| {
        FOREIGN_DAEMON_STARTS
            .iter()
            .any(|start| line.starts_with(start))
    };
    if !stderr_lines.iter().any(is_foreign_line) {
        return None;
    }
    let own_program = own_program.display();
    let Some(command) = set_command else {
        let found_program = stderr_lines
            .iter()
            .find_map(|line| line.strip_prefix(FOUND_DAEMON_MARK))
            .map_or("pvmd", str::trim);
        return Some(format!(
            "{own_program} does not exist there, and {found_program}, which PATH finds there, is the daemon of another \
             PVM, not Sempa's: install Sempa there in the same place, or name its pvmd with dx= in the host file or \
             with PVM_DPATH in the environment of the master"
        ));
    };
    Some(format!(
        "{command:?} starts the daemon of another PVM there, not Sempa's: let dx= or PVM_DPATH name the pvmd of a \
         Sempa installation on that host, or remove the setting and install Sempa there as {own_program}"
    ))
}

/// Returns the command by which a person tries the remote shell: `ssh`, unless `PVM_RSH` names
/// another one.
fn trial_command(remote_shell: Option<&str>, contact: &str, login: Option<&str>) -> String {
    let (remote_shell, contact) = (remote_shell.unwrap_or("ssh"), shell_words::quote(contact));
    match login {
        Some(login) => format!(
            "{remote_shell} {contact} -l {} true",
            shell_words::quote(login)
        ),
        None => format!("{remote_shell} {contact} true"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(stderr: &str, set_command: Option<&str>) -> Option<String> {
        let lines = stderr.lines().map(str::to_string).collect();
        foreign_daemon_reason(&lines, set_command, Path::new("/opt/sempa/bin/pvmd"))
    }

    #[test]
    fn daemon_of_another_pvm_is_named() {
        let stderr =
            "pvmd in PATH: /usr/bin/pvmd\n[pvmd pid7] 11/30 07:03:34 slave_config: bad args\n";
        let text = reason(stderr, None).expect("a reason");
        for part in [
            "/opt/sempa/bin/pvmd does not exist",
            "/usr/bin/pvmd, which PATH finds",
            "PVM_DPATH",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let text = reason(stderr, Some("/usr/bin/pvmd")).expect("a reason");
        assert!(
            text.starts_with("\"/usr/bin/pvmd\" starts the daemon of another PVM"),
            "{text}"
        );
        let as_root =
            "*** Error: PVM is being run as user \"root\" ***!\nThis is not a good idea\n";
        assert!(reason(as_root, None).is_some());
        for other in [
            "",
            "pvmd in PATH: /usr/bin/pvmd\nsh: 1: exec: pvmd: not found\n",
            "bash: [pvmd pid",
        ] {
            assert_eq!(reason(other, None), None, "{other}");
        }
    }

    /// The command to try has the remote shell, the address and the login name of the failed start.
    #[test]
    fn trial_command_is_what_the_start_used() {
        assert_eq!(trial_command(None, "nc2", None), "ssh nc2 true");
        assert_eq!(
            trial_command(None, "10.0.0.2", Some("guest")),
            "ssh 10.0.0.2 -l guest true"
        );
        assert_eq!(
            trial_command(Some("rsh -n"), "n;c2", None),
            "rsh -n 'n;c2' true"
        );
    }
}
