//! Assembles a daemon (certificates, sockets, state machine, loop), runs the daemon, and releases
//! its resources at its end.
//!
//! Master and slave differ in the source of their settings ([`super::cli`], [`super::slave`]) and
//! in how they report that they are ready.

use super::bulk_fallback::BulkFallbacks;
use super::checkpoints::{CheckpointService, ClaimIdentity, StoreSettings, StoreSettingsError};
use super::driver::{DaemonParts, Driver};
use super::env::env_var;
use super::failpoints::Failpoints;
use super::host_env::{
    ARCH_NAME, DATA_SIGNATURE, HostEnvironment, HostEnvironmentSettings, is_loader_folder,
    library_folder, programs_folder, unix_time,
};
use super::host_start::{HostStarter, HostStarterSettings};
use super::images::ImageTransfers;
use super::input::INPUT_QUEUE_MAX;
use super::log::{self, Log};
use super::memory_transfer::MemoryTransfers;
use super::migration_files::MigrationFiles;
use super::net::{Net, bind_udp};
use super::pki::{Authority, HostCredentials};
use super::program_state::ProgramStateFiles;
use super::rate_limit::RateLimit;
use super::runtime_dir::RuntimeDir;
use super::ssh::SshCommand;
use super::sys::{OpenFilesLimit, raise_files_limit};
use super::tasker::TaskerProcess;
use super::transfer_counters::TransferCounters;
use super::vm_note::NoteKeeper;
use super::{address, task_listener};
use anyhow::Context;
use checkpoint::capabilities::{self, CapabilitySet};
use checkpoint::{allocator, boot_clock};
use pvmd_machine::{Machine, MachineConfig};
use sempa_notes::{NoteFolder, VmNote};
use sempa_proto::route::{self, DIRECT_ROUTES_VARIABLE};
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::{HostId, Micros, lease};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Idle time after which a blocking (disk) thread ends. Work is distributed to all idle threads in
/// turn. With tokio's default idle time of ten seconds, one checkpoint per second would prevent
/// every thread from ending.
const DISK_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Number of arenas of the memory allocator: one for the daemon's main thread, and one for all
/// threads that read and write files.
const HEAP_ARENA_COUNT: i32 = 2;
/// Number of bytes of freed memory that the allocator retains for reuse. Also the size from which
/// the allocator maps an allocation separately.
const HEAP_RETAINED_BYTES: i32 = 32 << 20;

/// The role of a daemon in the virtual machine.
pub(crate) enum Role {
    /// The daemon creates the virtual machine.
    Master {
        /// The lines of the host file.
        hostfile_lines: Vec<String>,
    },
    /// A master has started the daemon.
    Slave {
        credentials: HostCredentials,
        /// Addresses at which the slave may reach the master.
        master_addresses: Vec<SocketAddr>,
    },
}

/// Settings that differ between daemons.
pub(crate) struct DaemonSetup {
    pub(crate) runtime_dir: RuntimeDir,
    pub(crate) host: HostId,
    pub(crate) name: String,
    pub(crate) speed: i32,
    pub(crate) environment_settings: HostEnvironmentSettings,
    pub(crate) lease: Duration,
    /// Addresses that the daemon announces before all other addresses.
    pub(crate) preferred_addresses: Vec<IpAddr>,
    pub(crate) role: Role,
}

/// Contact data of a daemon that is ready to accept connections.
pub(crate) struct ReadyDaemon {
    pub(crate) socket: PathBuf,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// Capabilities that a daemon retains if it runs as root. Only the tasker is a privileged process.
const NEEDED_CAPABILITIES: CapabilitySet = CapabilitySet::empty()
    // The daemon opens the checkpoint store, the logs and the tasks' programs in folders of other
    // users.
    .union(CapabilitySet::DAC_OVERRIDE)
    // The daemon signals tasks that have changed their user.
    .union(CapabilitySet::KILL)
    // The daemon raises the priority of threads that send images.
    .union(CapabilitySet::SYS_NICE);

/// Runs a daemon until it ends. `announce` is called once the daemon is ready.
///
/// # Errors
/// The daemon cannot be set up. All files that the daemon had created on the host are then removed.
pub(crate) fn run_daemon(
    setup: DaemonSetup,
    announce: impl FnOnce(ReadyDaemon) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // Must happen before capabilities are dropped: root may bind any port and set larger socket
    // buffers than other users.
    let port = env_var("PVMNETSOCKPORT").and_then(|v| v.parse().ok());
    let socket =
        bind_udp(port.unwrap_or(0)).context("cannot open a UDP port for the other daemons")?;
    // Must happen before other threads start, because each thread has its own capabilities.
    // Programs that the daemon starts as root regain root's capabilities by exec.
    capabilities::retain_capabilities(NEEDED_CAPABILITIES).context("cannot drop privileges")?;
    let log_path =
        env_var("SEMPA_LOG").map_or_else(|| setup.runtime_dir.paths().log_file(), PathBuf::from);
    let log_bytes_max = env_var("PVMDLOGMAX")
        .and_then(|v| v.parse().ok())
        .unwrap_or(log::LOG_BYTES_MAX_DEFAULT);
    let (log, mut log_thread) = log::open_log(&log_path, setup.host, log_bytes_max)
        .with_context(|| format!("cannot write the log {}", log_path.display()))?;
    log_thread.collect_events(&log);
    allocator::limit_arenas(HEAP_ARENA_COUNT);
    allocator::retain_freed_bytes(HEAP_RETAINED_BYTES);
    sempa_socket::request_short_slice();
    // A single thread runs the loop and all streams. This thread forwards a received message
    // without waking another thread; waking a thread would cost more than all other work on the
    // message. Disk access uses blocking threads.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(DISK_THREAD_KEEP_ALIVE)
        .build()
        .context("cannot start the daemon's thread")?;
    let result = runtime.block_on(assemble_and_run(setup, socket, log, announce));
    runtime.shutdown_timeout(Duration::from_secs(2));
    log_thread.join();
    result
}

// tidy: long because the function creates the parts of the daemon one after the other, and later
// parts need earlier ones
async fn assemble_and_run(
    setup: DaemonSetup,
    socket: UdpSocket,
    log: Log,
    announce: impl FnOnce(ReadyDaemon) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let DaemonSetup {
        runtime_dir,
        host,
        name,
        speed,
        environment_settings,
        lease,
        preferred_addresses,
        role,
    } = setup;
    let (paths, uid) = (runtime_dir.paths().clone(), nix::unistd::getuid().as_raw());
    let (inputs, input_queue) = mpsc::channel(INPUT_QUEUE_MAX);
    let files_limit = raise_files_limit().context("cannot raise the limit of open files")?;
    let signals = catch_signals()?;
    let RoleParts {
        hostfile_lines,
        master_addresses,
        credentials,
        authority,
    } = RoleParts::for_role(role, &paths, host)?;
    let is_master = authority.is_some();
    let mut net = Net::start(
        socket,
        &credentials,
        (paths.vm_name(), host),
        lease,
        inputs.clone(),
    )?;
    let rate = Arc::new(
        RateLimit::parse(env_var("SEMPA_MOVE_RATE").as_deref()).map_err(anyhow::Error::msg)?,
    );
    let addresses = address::addresses_to_announce(
        env_var("SEMPA_ADDRESS").as_deref(),
        &preferred_addresses,
        net.port()?,
    );
    let addresses = addresses.map_err(anyhow::Error::msg)?;
    let listener =
        task_listener::bind_task_socket(&paths.daemon_socket_path()).with_context(|| {
            format!(
                "cannot listen for tasks at {}",
                paths.daemon_socket_path().display()
            )
        })?;
    let programs_dir = programs_folder().context("cannot find the folder of this program")?;
    let starter_settings = authority.map(|authority| {
        starter_settings(
            authority,
            &paths,
            &addresses,
            lease,
            &programs_dir,
            files_limit,
        )
    });
    let store_settings = StoreSettings::from_env(env_var);
    let reserved_ids = if is_master {
        reserved_task_ids(&store_settings, paths.vm_name())
    } else {
        BTreeMap::new()
    };
    let config = MachineConfig {
        host,
        host_name: name.clone(),
        vm_name: paths.vm_name().to_string(),
        arch: ARCH_NAME.into(),
        dsig: DATA_SIGNATURE,
        addresses: addresses.clone(),
        allows_automatic_routes: allows_automatic_routes(),
        speed,
        uid,
        lease: Micros(u64::try_from(lease.as_micros()).unwrap_or(u64::MAX)),
        rm_command: if is_master {
            command_from_env("PVM_RM")?
        } else {
            None
        },
        server_commands: server_commands(is_master)?,
        starts_watcher: true,
        paths: paths.clone(),
        hostfile_lines,
        reserved_ids_max: reserved_ids,
        copy_policy: store_settings
            .as_ref()
            .map(|settings| settings.copies().clone())
            .unwrap_or_default(),
        store_dir: store_settings
            .as_ref()
            .map(|settings| settings.dir().display().to_string())
            .unwrap_or_default(),
    };
    let note = VmNote::new(
        paths.vm_name(),
        paths.dir(),
        &name,
        is_master,
        &credentials.authority_certificate,
    );
    let claim_lease = lease::replacement_delay(config.lease);
    log_startup(&name, &addresses, &runtime_dir);
    let transfer_counters = TransferCounters::default();
    let environment =
        HostEnvironment::new(environment_settings, &paths, uid, transfer_counters.clone());
    let library = environment.library().map(Path::to_path_buf);
    let accept_future = task_listener::accept_tasks(listener, uid, inputs.clone(), library);
    tokio::spawn(accept_future);
    if !master_addresses.is_empty() {
        net.keep_connected(HostId::MASTER, master_addresses);
    }
    let bulk_fallbacks = BulkFallbacks::new();
    let daemon_parts = DaemonParts {
        machine: Machine::new(config, boot_clock::now()),
        environment,
        inputs: input_queue,
        sessions: net,
        tasker: TaskerProcess::new(programs_dir.join("pvm-tasker"), files_limit, inputs.clone()),
        image_transfers: ImageTransfers::new(
            paths.clone(),
            inputs.clone(),
            rate.clone(),
            bulk_fallbacks.clone(),
            transfer_counters.clone(),
        ),
        memory_transfers: MemoryTransfers::new(
            paths.clone(),
            inputs.clone(),
            rate,
            bulk_fallbacks.clone(),
            transfer_counters,
        ),
        bulk_fallbacks,
        host_starter: HostStarter::new(starter_settings, inputs.clone()),
        program_state: ProgramStateFiles::new(paths.clone(), inputs.clone()),
        checkpoints: CheckpointService::new(
            paths.clone(),
            store_settings,
            ClaimIdentity::new(paths.vm_name(), &name, claim_lease),
            inputs.clone(),
        ),
        migration_files: MigrationFiles::new(&paths, inputs),
        failpoints: Failpoints::from_environment(),
        note: NoteKeeper::new(NoteFolder::from_env(env_var), note),
        log,
        runtime_dir,
    };
    announce(ReadyDaemon {
        socket: paths.daemon_socket_path(),
        addresses,
    })?;
    tracing::info!("ready");
    // The driver is spawned like the tasks that serve the streams. If `block_on` ran the driver
    // itself, each wake-up would need a system call.
    tokio::spawn(Driver::new(daemon_parts, is_master).run_loop(signals))
        .await
        .context("the daemon's loop has failed")?;
    Ok(())
}

/// Returns the highest task number in stored checkpoints for each host. No task number up to this
/// number may be assigned again.
///
/// If the store is unreadable, logs a warning and reserves no task number: starting tasks is more
/// important than checkpoints that cannot be read.
fn reserved_task_ids(
    settings: &Result<StoreSettings, StoreSettingsError>,
    vm: &str,
) -> BTreeMap<HostId, u32> {
    let settings_result = settings.as_ref().map_err(|reason| reason.to_string());
    let highest_ids = settings_result.and_then(|valid_settings| {
        valid_settings
            .highest_task_ids(vm, unix_time())
            .map_err(|reason| reason.to_string())
    });
    highest_ids.unwrap_or_else(|reason| {
        tracing :: warn!(
            "the store of checkpoints cannot be read, so tasks may get tids that are in it; a job that has one of them can be restarted \
             when that task has ended: {reason}");
        BTreeMap::new()
    })
}

/// The parts of a daemon that depend on its role.
struct RoleParts {
    hostfile_lines: Vec<String>,
    master_addresses: Vec<SocketAddr>,
    credentials: HostCredentials,
    /// Only on the master: issues certificates to new hosts.
    authority: Option<Arc<Authority>>,
}

impl RoleParts {
    fn for_role(role: Role, paths: &RuntimePaths, host: HostId) -> anyhow::Result<Self> {
        Ok(match role {
            Role::Master { hostfile_lines } => {
                let authority = Authority::new(paths.vm_name())?;
                let credentials = authority.issue(host)?;
                Self {
                    hostfile_lines,
                    master_addresses: Vec::new(),
                    credentials,
                    authority: Some(Arc::new(authority)),
                }
            }
            Role::Slave {
                credentials,
                master_addresses,
            } => Self {
                hostfile_lines: Vec::new(),
                master_addresses,
                credentials,
                authority: None,
            },
        })
    }
}

/// True if the libraries of this host's tasks may set up direct routes on their own.
fn allows_automatic_routes() -> bool {
    let value = env_var(DIRECT_ROUTES_VARIABLE);
    route::allows_automatic_routes(value.as_deref()).unwrap_or_else(|error| {
        tracing::warn!("{error}");
        false
    })
}

/// Writes the first lines of the log.
fn log_startup(name: &str, addresses: &[SocketAddr], runtime_dir: &RuntimeDir) {
    let address_texts: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let (version, pid) = (env!("CARGO_PKG_VERSION"), std::process::id());
    tracing::info!(
        "{name} ({}) {ARCH_NAME} sempa {version}, process {pid}",
        address_texts.join(" ")
    );
    if let Some(pid) = runtime_dir.predecessor() {
        tracing::warn!(
            "an earlier daemon (process {pid}) ended without cleaning up; its files were removed"
        );
    }
    if let Some(why) = runtime_dir.on_disk_reason() {
        tracing::warn!(
            "images of tasks, which contain all their memory, are written to a disk: {} is on a disk, and {why}; set \
             PVM_TMP to a directory in memory",
            runtime_dir.paths().dir().display()
        );
    }
}

fn starter_settings(
    authority: Arc<Authority>,
    paths: &RuntimePaths,
    addresses: &[SocketAddr],
    lease: Duration,
    programs_dir: &Path,
    files_limit: OpenFilesLimit,
) -> HostStarterSettings {
    HostStarterSettings {
        authority,
        vm: paths.vm_name().to_string(),
        addresses: addresses.to_vec(),
        library: library_folder(
            Some(programs_dir),
            std::env::var_os("SEMPA_LIB").as_ref(),
            None,
        )
        .filter(|folder| !is_loader_folder(folder)),
        allow_root: nix::unistd::getuid().is_root(),
        lease,
        remote_shell: env_var("PVM_RSH"),
        ssh: SshCommand::new(paths.ssh_config()),
        daemon_command: env_var("PVM_DPATH"),
        program: programs_dir.join("pvmd"),
        files_limit,
    }
}

/// Returns the commands of the servers in the environment: `PVM_TASKER` and, on the master,
/// `PVM_TRACER` and `PVM_HOSTER`, in PVM's order. Each command is split into words.
fn server_commands(is_master: bool) -> anyhow::Result<Vec<Vec<String>>> {
    let names: &[&str] = if is_master {
        &["PVM_TASKER", "PVM_TRACER", "PVM_HOSTER"]
    } else {
        &["PVM_TASKER"]
    };
    let mut commands = Vec::new();
    for name in names {
        commands.extend(command_from_env(name)?);
    }
    Ok(commands)
}

/// Returns the command in the environment variable `name`, split into words; `None` if the variable
/// is not set or empty.
fn command_from_env(name: &str) -> anyhow::Result<Option<Vec<String>>> {
    let Some(command) = env_var(name) else {
        return Ok(None);
    };
    let words = shell_words::split(&command)
        .with_context(|| format!("{name}={command:?} cannot be split into words"))?;
    Ok(Some(words).filter(|words| !words.is_empty()))
}

/// Catches the termination signals. Returns a receiver that yields, for each signal, the reason for
/// which the daemon ends. SIGHUP is not caught if the daemon was started with SIGHUP ignored.
fn catch_signals() -> anyhow::Result<mpsc::Receiver<String>> {
    let (sender, receiver) = mpsc::channel(8);
    let mut named_signals = vec![
        ("SIGTERM", SignalKind::terminate()),
        ("SIGINT", SignalKind::interrupt()),
    ];
    if !is_ignored(libc::SIGHUP) {
        named_signals.push(("SIGHUP", SignalKind::hangup()));
    }
    for (name, kind) in named_signals {
        let mut signals = signal(kind).with_context(|| format!("cannot catch {name}"))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let _ = sender.send(format!("caught {name}")).await;
            }
        });
    }
    Ok(receiver)
}

/// True if `signal` was ignored when this process was started, for example by nohup(1). The daemon
/// then continues to ignore the signal.
fn is_ignored(signal: i32) -> bool {
    checkpoint::proc::status(std::process::id().cast_signed())
        .is_some_and(|status| status.sigign & (1 << (signal - 1)) != 0)
}
