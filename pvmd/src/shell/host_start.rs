//! Starts daemons on other hosts over a remote shell, as PVM does: `$PVM_RSH host [-l user]
//! command`.
//!
//! The bootstrap line goes to the new daemon's standard input; its reply comes back as one line.
//! Hosts can also be started by a hoster or by a person at the master's terminal; the new daemon
//! then fetches its bootstrap line from the master (see `sealed_bootstrap`).

use super::bootstrap::{Bootstrap, ReadyReply, Refusal, parse_reply, to_hex};
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
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Maximum number of hosts started concurrently; further starts wait.
const CONCURRENT_STARTS_MAX: usize = 32;
/// Time limit for the start of one host, as in PVM.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which the bootstrap line is offered to a daemon that a hoster starts.
const OFFER_TIMEOUT: Duration = Duration::from_secs(180);
/// Time for which the bootstrap line is offered to a daemon that a person starts.
const MANUAL_OFFER_TIMEOUT: Duration = Duration::from_secs(900);
/// Time limit for the end of the remote shell after the daemon's reply.
const SHELL_EXIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of bytes read from the output of a remote shell.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of lines of standard error kept for the error message.
const STDERR_LINES_MAX: usize = 20;

/// Settings that are equal for all hosts started by this master.
pub(crate) struct HostStarterSettings {
    /// Issues the new hosts' certificates.
    pub(crate) authority: Arc<Authority>,
    pub(crate) vm: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) library: Option<PathBuf>,
    /// True if the user allowed this virtual machine to run as root.
    pub(crate) allow_root: bool,
    /// Silence after which a host is considered lost.
    pub(crate) lease: Duration,
    /// The limit on open files for the remote shell.
    pub(crate) files_limit: OpenFilesLimit,
    /// Remote shell command from `PVM_RSH`, if set.
    pub(crate) remote_shell: Option<String>,
    /// The remote shell if `PVM_RSH` is not set.
    pub(crate) ssh: SshCommand,
    /// Daemon command from `PVM_DPATH`, if set.
    pub(crate) daemon_command: Option<String>,
    /// Path of this program; other hosts try the same path first.
    pub(crate) program: PathBuf,
}

/// All host starts in progress. Owned by the daemon's loop.
pub(crate) struct HostStarter {
    settings: Option<Arc<HostStarterSettings>>,
    start_permits: Arc<Semaphore>,
    /// Held by the start that asks a person at the terminal.
    terminal_lock: Arc<Mutex<()>>,
    inputs: InputSender,
    running_starts: HashMap<StartId, AbortHandle>,
}

impl HostStarter {
    /// Without settings (on a slave) every start fails.
    pub(crate) fn new(settings: Option<HostStarterSettings>, inputs: InputSender) -> HostStarter {
        let start_permits = Arc::new(Semaphore::new(CONCURRENT_STARTS_MAX));
        let terminal = Arc::new(Mutex::new(()));
        HostStarter {
            settings: settings.map(Arc::new),
            start_permits,
            terminal_lock: terminal,
            inputs,
            running_starts: HashMap::new(),
        }
    }

    /// Starts a daemon. Reports [`Event::HostStarted`].
    pub(crate) fn start(&mut self, start: StartId, plan: HostPlan) {
        self.running_starts.retain(|_, task| !task.is_finished());
        let (settings, turns, terminal) = (
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
                    let ready = if plan.is_manual() {
                        attempt.run_manually(&terminal).await
                    } else {
                        let _turn = turns.acquire().await;
                        attempt.run().await
                    };
                    ready.map_err(|refusal| (refusal.error, attempt.describe_refusal(&refusal)))
                }
            };
            let result = result.map(|ready| StartedHost {
                arch: ready.arch,
                dsig: ready.dsig,
                addresses: ready.addresses,
            });
            let _ = inputs
                .send(Input::Event(Event::HostStarted { start, result }))
                .await;
        });
        self.running_starts.insert(start, task.abort_handle());
    }

    /// Prepares starts for a hoster; [`Event::HostsPrepared`] delivers the orders. The bootstrap
    /// lines are offered by this daemon until the attempts end.
    pub(crate) fn prepare_for_hoster(&mut self, plans: Vec<(StartId, HostPlan)>) {
        let (settings, inputs) = (self.settings.clone(), self.inputs.clone());
        let (order_sender, ready) = tokio::sync::mpsc::unbounded_channel();
        let count = plans.len();
        for (start, plan) in plans {
            let (settings, order_sender) = (settings.clone(), order_sender.clone());
            let task = tokio::spawn(async move {
                let refuse = |text: String| (PvmError::CantStart, text);
                let Some(settings) = settings else {
                    let _ = order_sender
                        .send((start, Err(refuse("only the master starts daemons".into()))));
                    return;
                };
                let attempt = HostStart {
                    settings: &settings,
                    plan: &plan,
                };
                let offered = attempt.create_offer().await;
                let sealed = offered.map_err(|text| {
                    refuse(format!("cannot start a daemon on {}: {text}", plan.name))
                });
                match sealed {
                    Ok((order, listener, sealed)) => {
                        let _ = order_sender.send((start, Ok(order)));
                        // An upper bound: the state machine usually ends the attempt earlier.
                        let within = if plan.is_manual() {
                            MANUAL_OFFER_TIMEOUT
                        } else {
                            OFFER_TIMEOUT
                        };
                        let _ =
                            timeout(within, sealed_bootstrap::serve_sealed(listener, sealed)).await;
                    }
                    Err(refused) => drop(order_sender.send((start, Err(refused)))),
                }
            });
            self.running_starts.insert(start, task.abort_handle());
        }
        drop(order_sender);
        tokio::spawn(async move {
            let (mut ready, mut orders) = (ready, Vec::with_capacity(count));
            while orders.len() < count
                && let Some(order) = ready.recv().await
            {
                orders.push(order);
            }
            let _ = inputs
                .send(Input::Event(Event::HostsPrepared { orders }))
                .await;
        });
    }

    /// Ends an attempt with the reply that a hoster received from the daemon it started.
    pub(crate) fn on_hoster_reply(&mut self, start: StartId, line: &str) -> Event {
        self.abandon(start);
        let line = line.trim_end();
        let result = parse_reply(line).unwrap_or_else(|| {
            let error = PvmError::from_name(line).unwrap_or(PvmError::CantStart);
            Err(Refusal {
                error,
                text: format!("the hoster replied {line:?}"),
            })
        });
        let result = result
            .map(|ready| StartedHost {
                arch: ready.arch,
                dsig: ready.dsig,
                addresses: ready.addresses,
            })
            .map_err(|refusal| (refusal.error, refusal.text));
        Event::HostStarted { start, result }
    }

    /// Aborts an attempt; its remote shell is killed.
    pub(crate) fn abandon(&mut self, start: StartId) {
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

    async fn run(&self) -> Result<ReadyReply, Refusal> {
        let cannot_start = |text: String| Refusal {
            error: PvmError::CantStart,
            text,
        };
        let words = self.command_line().await.map_err(cannot_start)?;
        let bootstrap = self.bootstrap().map_err(|e| cannot_start(e.to_string()))?;
        let line = bootstrap.to_line();
        let mut command = Command::new(&words[0]);
        self.settings.files_limit.apply_to(command.as_std_mut());
        let mut child = command
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| {
                cannot_start(format!(
                    "the remote shell {} cannot be executed: {e}; set PVM_RSH to another one",
                    words[0]
                ))
            })?;
        match timeout(START_TIMEOUT, self.exchange(&mut child, &line)).await {
            Ok(Ok(ready)) => {
                // The daemon has left the shell's session, so the remote shell ends soon.
                tokio::spawn(
                    async move { timeout(SHELL_EXIT_TIMEOUT, child.wait()).await.is_ok() },
                );
                Ok(ready)
            }
            Ok(Err(refusal)) => Err(refusal),
            Err(_) => Err(cannot_start(format!(
                "giving up after {} s without an answer",
                START_TIMEOUT.as_secs()
            ))),
        }
    }

    /// Asks a person at the master's terminal to start the daemon.
    async fn run_manually(&self, terminal: &Mutex<()>) -> Result<ReadyReply, Refusal> {
        let cant = |text: String| Refusal {
            error: PvmError::CantStart,
            text,
        };
        manual_start::check_can_ask()?;
        let _turn = terminal.lock().await;
        let (order, listener, sealed) = self.create_offer().await.map_err(cant)?;
        tokio::select! {
            answer = manual_start::ask(&order) => answer,
            () = sealed_bootstrap::serve_sealed(listener, sealed) => Err(cant("the TCP port for it has failed".into())),
        }
    }

    /// Creates the order for a hoster or a person, and the listener and encrypted line for the new
    /// daemon.
    async fn create_offer(&self) -> Result<(HosterOrder, TcpListener, Vec<u8>), String> {
        let secret = BootstrapSecret::new();
        let bootstrap = self.bootstrap().map_err(|e| e.to_string())?;
        let sealed = secret.seal(&bootstrap.to_line());
        let listener = sealed_bootstrap::listen_any()
            .await
            .map_err(|e| format!("cannot open a TCP port for it: {e}"))?;
        let port = listener
            .local_addr()
            .map_err(|e| format!("cannot open a TCP port for it: {e}"))?
            .port();
        let option = format!(
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
                command: self.remote_command(&option),
                secret: secret.to_hex_text(),
            },
            listener,
            sealed,
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

    /// Returns the command for the remote host: the user's command; else this program's path if it
    /// exists on that host; else `pvmd` from the search path. A person gets only the path, because
    /// the script would be long to type.
    fn remote_command(&self, extra_options: &str) -> String {
        let by_hand = self.plan.is_manual();
        let slave_option = if by_hand { "-S" } else { "-s" };
        if let Some(command) = self
            .plan
            .command
            .as_ref()
            .or(self.settings.daemon_command.as_ref())
        {
            return format!("{command} {slave_option}{extra_options}");
        }
        let program = self.settings.program.to_string_lossy();
        let program = shell_words::quote(&program);
        if by_hand {
            return format!("{program} {slave_option}{extra_options}");
        }
        let script = format!(
            "if [ -x {program} ]; then exec {program} -s{extra_options}; else exec pvmd -s{extra_options}; fi"
        );
        format!("sh -c {}", shell_words::quote(&script))
    }

    fn bootstrap(&self) -> Result<Bootstrap, PkiError> {
        let identity = self.settings.authority.issue(self.plan.id)?;
        Ok(Bootstrap {
            ddpro: Bootstrap::VERSION,
            vm: self.settings.vm.clone(),
            host: self.plan.id.index(),
            name: self.plan.name.clone(),
            authority: to_hex(&identity.authority_certificate),
            certificate: to_hex(&identity.certificate),
            key: to_hex(&identity.key),
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

    /// Writes the bootstrap line and waits for the reply. If there is no reply, reads the output to
    /// the end to find the reason.
    async fn exchange(&self, child: &mut Child, line: &str) -> Result<ReadyReply, Refusal> {
        let mut stdin = child.stdin.take().expect("it is a pipe");
        let stdout = child.stdout.take().expect("it is a pipe");
        let stderr = child.stderr.take().expect("it is a pipe");
        let write_line = async {
            // A remote shell that ends without reading reports the reason on its standard error.
            let _ = stdin.write_all(line.as_bytes()).await;
            drop(stdin);
        };
        let answer = async {
            let mut lines = BufReader::new(stdout.take(OUTPUT_BYTES_MAX)).split(b'\n');
            while let Ok(Some(line)) = lines.next_segment().await {
                let line = String::from_utf8_lossy(&line);
                if let Some(reply) = parse_reply(line.trim_end()) {
                    return Some(reply);
                }
                tracing::info!("stdout@{}: {}", self.plan.name, line.trim_end());
            }
            None
        };
        let stderr_reader = async {
            let mut last = VecDeque::new();
            let mut lines = BufReader::new(stderr.take(OUTPUT_BYTES_MAX)).split(b'\n');
            while let Ok(Some(line)) = lines.next_segment().await {
                let line = String::from_utf8_lossy(&line).trim().to_string();
                if line.is_empty() {
                    continue;
                }
                tracing::info!("stderr@{}: {line}", self.plan.name);
                last.push_back(line);
                if last.len() > STDERR_LINES_MAX {
                    last.pop_front();
                }
            }
            last
        };
        let mut stderr_reader = std::pin::pin!(stderr_reader);
        let mut stderr_lines = None;
        let mut exchange = std::pin::pin!(async { tokio::join!(write_line, answer).1 });
        let reply = loop {
            tokio::select! {
                reply = &mut exchange => break reply,
                lines = &mut stderr_reader, if stderr_lines.is_none() => stderr_lines = Some(lines),
            }
        };
        if let Some(reply) = reply {
            return reply;
        }
        let stderr_lines = match stderr_lines {
            Some(stderr_lines) => stderr_lines,
            None => stderr_reader.await,
        };
        let status = child.wait().await.ok().and_then(|s| s.code());
        Err(self.diagnose(&stderr_lines, status))
    }

    /// Derives the reason of a failure from the remote shell's standard error and exit status.
    fn diagnose(&self, stderr_lines: &VecDeque<String>, status: Option<i32>) -> Refusal {
        let last = stderr_lines.back().map_or("no output", String::as_str);
        let unknown = [
            "could not resolve hostname",
            "name or service not known",
            "unknown host",
            "no address associated",
        ];
        let contains_any = |words: &[&str]| {
            stderr_lines
                .iter()
                .any(|l| words.iter().any(|w| l.to_ascii_lowercase().contains(w)))
        };
        let (error, meaning) = if contains_any(&unknown) {
            (
                PvmError::NoHost,
                "the host is unknown: check its name, or give its address with ip=",
            )
        } else if status == Some(127) || contains_any(&["not found", "no such file"]) {
            (
                PvmError::CantStart,
                "pvmd was not found there: install it, or name it with dx= or PVM_DPATH",
            )
        } else if status == Some(255) {
            (
                PvmError::CantStart,
                "the remote shell could not reach the host: try it by hand, or set PVM_RSH",
            )
        } else {
            (PvmError::CantStart, "the daemon there did not start")
        };
        let status = status.map_or("a signal".to_string(), |code| format!("status {code}"));
        Refusal {
            error,
            text: format!(
                "{meaning} (the remote shell ended with {status}; last line of its standard error: {last})"
            ),
        }
    }
}
