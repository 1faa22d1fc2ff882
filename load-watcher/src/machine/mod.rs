//! The load watcher of a whole machine: observes the machine once, and decides for each virtual
//! machine of each user what its guests may do. See [`pvm_load_watcher::machine_link`].
//!
//! The tasker service starts this process as root. The process opens its socket and then becomes an
//! unprivileged user, because everything that it reads may be read by all users.

mod connection;
mod supervisor;

use crate::SourceArgs;
use crate::owner_view::OwnerView;
use crate::sensors::{
    ACCOUNT_PATH_INDEX, CommonPaths, LoadMeter, OtherPath, Sensors, is_not_login_records,
};
use anyhow::Context;
use connection::{Connection, Connections, VmView};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use pvm_load_watcher::file_watcher::WakeReasons;
use pvm_load_watcher::host_policy::{
    HostPolicy, PolicyFile, PolicyFileContent, PolicyPaths, UserPolicySource, VmUser, user_name,
};
use pvm_load_watcher::machine_link::{
    FromMachine, HostState, PROTOCOL_VERSION, SOCKET_NAME, ToMachine, VmFacts,
};
use pvm_load_watcher::owner::Evidence;
use pvm_load_watcher::policy::Policy;
use pvm_load_watcher::report::Reporter;
use pvm_load_watcher::shared_limit::SharedLimit;
use pvm_load_watcher::system::{time_of_day, to_micros};
use sempa_proto::Micros;
use sempa_service_settings::host_account::{
    ACCOUNT_DIR_VARIABLE, HostTotals, account_dir, is_running, read_totals,
};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use supervisor::Supervisor;

/// Interval at which the load of other programs is measured.
const EXTERNAL_LOAD_INTERVAL: Micros = Micros::from_secs(10);
/// Maximum time between two signs of life for the tasker service.
const LIFE_SIGN_INTERVAL: Micros = Micros::from_secs(3);
/// Maximum number of connections that are accepted before other events are handled.
const ACCEPTS_PER_ROUND_MAX: usize = 64;

pub(crate) struct MachineWatcher {
    started_at: Instant,
    listener: UnixListener,
    supervisor: Supervisor,
    wake_epoll: Epoll,
    paths: CommonPaths,
    sensors: Sensors,
    connections: Connections,
    /// Directory in which the taskers record their guests.
    account_dir: PathBuf,
    /// The policy of the owner and the administrator for a user without a policy. Its limits apply
    /// to the guests of all users together.
    common_view: OwnerView,
    /// Measures the tasks of all virtual machines.
    meter: LoadMeter,
    reporter: Reporter,
    next_sample_at: Micros,
    external_load_due: Micros,
    life_sign_due: Micros,
}

/// Reads the policies that apply to the virtual machine of a user.
fn read_policy(paths: &CommonPaths, user: VmUser, user_policy: PolicyFile) -> HostPolicy {
    let paths = PolicyPaths {
        user: UserPolicySource::Received(user_policy),
        admin: paths.admin.clone(),
        overrides: paths.overrides.clone(),
    };
    HostPolicy::read_and_merge(paths, user)
}

impl MachineWatcher {
    /// Opens the socket in `dir` and all sources, and gives up the privileges of root.
    ///
    /// # Errors
    /// A system call failed, or the load of this host cannot be sampled.
    pub(crate) fn open(dir: &Path, args: &SourceArgs) -> anyhow::Result<Self> {
        let listener = open_listener(&dir.join(SOCKET_NAME))?;
        let supervisor = Supervisor::from_stdin()?;
        // The administrator has started this process, so the paths are used as they are.
        let paths = CommonPaths::from_args(args);
        supervisor::drop_privileges().context("giving up the privileges of root")?;
        let account_dir = account_dir(std::env::var_os(ACCOUNT_DIR_VARIABLE));
        Self::new(listener, supervisor, paths, account_dir, args)
    }

    /// Opens all sources.
    ///
    /// # Errors
    /// A system call failed, or the load of this host cannot be sampled.
    fn new(
        listener: UnixListener,
        supervisor: Supervisor,
        paths: CommonPaths,
        account_dir: PathBuf,
        args: &SourceArgs,
    ) -> anyhow::Result<Self> {
        let sensors = Sensors::open(args, &paths, OtherPath::Account(account_dir.clone()))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let nobody = VmUser {
            uid: u32::MAX,
            name: String::new(),
            defaults: Policy::default(),
        };
        let no_file = PolicyFile {
            name: String::new(),
            content: PolicyFileContent::Missing,
        };
        let common_policy = read_policy(&paths, nobody, no_file);
        let fds = [listener.as_fd(), supervisor.fd()].into_iter();
        let fds = fds
            .chain(sensors.logind_fd())
            .chain(common_policy.file_users_fd());
        for fd in fds {
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        Ok(Self {
            started_at: Instant::now(),
            listener,
            supervisor,
            wake_epoll: epoll,
            common_view: OwnerView::new(u32::MAX, String::new(), common_policy),
            paths,
            sensors,
            connections: Connections::default(),
            account_dir,
            meter: LoadMeter::new(),
            reporter: Reporter::default(),
            next_sample_at: Micros::default(),
            external_load_due: Micros::default(),
            life_sign_due: Micros::default(),
        })
    }

    fn now(&self) -> Micros {
        to_micros(self.started_at.elapsed())
    }

    /// Serves virtual machines until the tasker service ends.
    ///
    /// # Errors
    /// The load of this host cannot be sampled.
    pub(crate) fn run_main_loop(mut self) -> anyhow::Result<()> {
        tracing::info!("observing this machine for all virtual machines");
        while self.run_once()? {}
        Ok(())
    }

    /// Waits for one event and handles the event. Returns false if the tasker service has ended.
    fn run_once(&mut self) -> anyhow::Result<bool> {
        let now = self.now();
        if now >= self.life_sign_due {
            self.report_life();
            self.life_sign_due = now + LIFE_SIGN_INTERVAL;
        }
        let due = match self.connections.is_empty() {
            true => self.life_sign_due,
            false => self.life_sign_due.min(self.next_sample_at),
        };
        let timeout = Duration::from_micros(due.since(now).0);
        let wake_reasons = self.sensors.wait(timeout, self.wake_epoll.0.as_fd());
        if wake_reasons.any_change() {
            self.read_changes(wake_reasons);
        }
        if wake_reasons.additional_fd_ready {
            if self.supervisor.has_ended() {
                return Ok(false);
            }
            self.handle_events();
        }
        if !self.connections.is_empty() && self.now() >= self.next_sample_at {
            self.take_sample()?;
        }
        Ok(true)
    }

    fn read_changes(&mut self, wake_reasons: WakeReasons) {
        self.sensors.read(|index| wake_reasons.path_changed(index));
        let has_other_change = (0..ACCOUNT_PATH_INDEX)
            .any(|index| wake_reasons.path_changed(index))
            || wake_reasons.terminal_used();
        if has_other_change {
            self.read_policies(|index| wake_reasons.path_changed(index));
            self.assess_all();
        } else {
            // Only the guests of the virtual machines have changed.
            self.share_guest_limit();
            self.send_new_states();
        }
    }

    /// Returns the number of guests that the owner permits to all users together.
    fn guest_limit(&self) -> Option<u32> {
        self.common_view.policy().cores
    }

    /// Reads policies again in all views.
    fn read_policies(&mut self, selects_index: impl Fn(usize) -> bool) {
        self.common_view.read_policies(&selects_index);
        for view in self.connections.views_mut() {
            view.owner.read_policies(&selects_index);
        }
        self.share_guest_limit();
        self.report_life();
    }

    /// Tells the tasker service that this process runs, and how many guests all virtual machines
    /// may have.
    fn report_life(&mut self) {
        let of_machine = self.guest_limit();
        let views = self.connections.views_mut();
        let limits: Vec<SharedLimit> = views.map(|view| view.shared_limit(of_machine)).collect();
        self.supervisor
            .report_life(SharedLimit::cap(of_machine, limits));
    }

    /// Counts the guests of each virtual machine against the limits of all others.
    fn share_guest_limit(&mut self) {
        let of_machine = self.guest_limit();
        let has_limit = |view: &mut VmView| view.owner.policy().cores.is_some();
        let totals = match self.connections.views_mut().any(has_limit) {
            // Without the account the taskers still enforce the limit.
            true => read_totals(&self.account_dir, is_running).unwrap_or_default(),
            false => HostTotals::default(),
        };
        for view in self.connections.views_mut() {
            view.count_other_guests(of_machine, &totals);
        }
    }

    // ---- Connections

    fn handle_events(&mut self) {
        if self.sensors.take_session_change() {
            self.assess_all();
        }
        self.common_view.take_file_users_event();
        self.accept_connections();
        for id in self.connections.ids() {
            self.read_connection(id);
        }
    }

    fn accept_connections(&mut self) {
        for _ in 0..ACCEPTS_PER_ROUND_MAX {
            let Ok((stream, _)) = self.listener.accept() else {
                return;
            };
            // A connection that cannot be used is closed.
            if stream.set_nonblocking(true).is_ok()
                && let Ok(peer) = getsockopt(&stream, PeerCredentials)
                && self
                    .wake_epoll
                    .add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, 1))
                    .is_ok()
            {
                self.connections
                    .add(Connection::new(stream, peer.uid(), peer.pid()));
            }
        }
    }

    fn read_connection(&mut self, id: u64) {
        let now = self.now();
        let Some(connection) = self.connections.get_mut(id) else {
            return;
        };
        let messages = match connection.receive(now) {
            Ok(messages) => messages,
            Err(error) => {
                if error.kind() != ErrorKind::UnexpectedEof {
                    tracing::debug!("user {}: {error}", connection.uid);
                }
                return self.connections.remove(id);
            }
        };
        for message in messages {
            match message {
                ToMachine::Facts(facts) => self.handle_facts(id, facts),
                ToMachine::Ping(number) => self.connections.send(id, &FromMachine::Pong(number)),
            }
        }
        let has_event = self
            .connections
            .get_mut(id)
            .and_then(|connection| connection.view.as_mut())
            .is_some_and(|view| view.owner.take_file_users_event());
        if has_event {
            self.assess(id);
        }
    }

    /// Creates or changes the view of a virtual machine.
    fn handle_facts(&mut self, id: u64, facts: VmFacts) {
        let is_first = self.connections.is_empty();
        let Some(connection) = self.connections.get_mut(id) else {
            return;
        };
        let refusal = match (
            facts.protocol,
            Policy::parse_without_owners("settings", &facts.guest_defaults),
        ) {
            (PROTOCOL_VERSION, Ok(defaults)) => {
                connection.set_facts(facts, |connection, facts| {
                    let user = VmUser {
                        uid: connection.uid,
                        name: user_name(connection.uid),
                        defaults,
                    };
                    read_policy(&self.paths, user, facts.user_policy.clone())
                });
                None
            }
            (PROTOCOL_VERSION, Err(error)) => Some(error.to_string()),
            (other, _) => Some(format!(
                "the load watcher of this machine has version {} and protocol {PROTOCOL_VERSION}, that of the virtual \
                 machine protocol {other}",
                env!("CARGO_PKG_VERSION")
            )),
        };
        if let Some(refusal) = refusal {
            self.connections.send(id, &FromMachine::Refused(refusal));
            return self.connections.remove(id);
        }
        let view = self.connections.view_mut(id);
        if let Some(fd) = view.and_then(|view| view.owner.host_policy.file_users_fd()) {
            // The descriptor may be there since the previous message.
            let _ = self
                .wake_epoll
                .add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 2));
        }
        self.share_guest_limit();
        self.report_life();
        if is_first {
            // Nothing was sampled while there was no virtual machine.
            self.next_sample_at = Micros::default();
        }
        self.assess(id);
    }

    // ---- Assessments

    fn assess_all(&mut self) {
        for id in self.connections.ids() {
            self.assess_and_send(id);
        }
        self.watch_terminals();
    }

    /// Derives the state of the machine for one virtual machine, and sends the state if it has
    /// changed.
    fn assess(&mut self, id: u64) {
        self.assess_and_send(id);
        self.watch_terminals();
    }

    fn assess_and_send(&mut self, id: u64) {
        if let Some(view) = self.connections.view_mut(id) {
            view.owner.assess(&mut self.sensors, view.facts.has_rm);
            self.send_if_new(id);
        }
    }

    fn send_new_states(&mut self) {
        for id in self.connections.ids() {
            self.send_if_new(id);
        }
    }

    fn send_if_new(&mut self, id: u64) {
        if let Some(view) = self.connections.view_mut(id) {
            let state = view.state(&self.sensors);
            if view.is_new(&state) {
                self.send_state(id, state);
            }
        }
    }

    fn send_state(&mut self, id: u64, state: HostState) {
        if let Some(view) = self.connections.view_mut(id) {
            view.record_sent(&state);
        }
        self.connections
            .send(id, &FromMachine::State(Box::new(state)));
    }

    /// Watches the terminals that some view considers idle.
    fn watch_terminals(&mut self) {
        let views = self.connections.views_mut();
        let idle_after = views.map(|view| view.owner.idle_after()).min();
        if let Some(idle_after) = idle_after {
            self.sensors.watch_idle_terminals(time_of_day(), idle_after);
        }
    }

    // ---- Samples

    /// Takes a sample, executes the periodic actions that are due, and sends the sample to all
    /// virtual machines.
    fn take_sample(&mut self) -> anyhow::Result<()> {
        let now = self.now();
        let must_restart = self.sensors.take_sample(now)?;
        let check = self.sensors.run_periodic_checks(now);
        if check.must_retry_policies {
            let must_read = self.sensors.retry_unwatched(is_not_login_records);
            if must_read.contains(&true) {
                self.read_policies(|index| must_read[index]);
            }
            self.common_view.retry_policies();
        }
        if must_restart {
            self.meter.restart();
        }
        let is_new_minute = self.sensors.take_new_minute();
        let available_bytes = self.sensors.last_sample.available_bytes;
        for view in self.connections.views_mut() {
            if check.must_retry_policies {
                view.owner.retry_policies();
            }
            view.measure_tasks(&self.sensors, must_restart);
        }
        if check.was_slow && now >= self.external_load_due {
            self.external_load_due = now + EXTERNAL_LOAD_INTERVAL;
            self.measure_external_load();
        }
        self.share_guest_limit();
        let memory_matters = self
            .connections
            .views_mut()
            .any(|view| view.owner.policy().memory_free.is_some());
        self.sensors.set_memory_matters(memory_matters);
        for id in self.connections.ids() {
            let Some(view) = self.connections.view_mut(id) else {
                continue;
            };
            let hours_matter = is_new_minute && view.owner.host_policy.depends_on_clock();
            if check.must_assess
                || hours_matter
                || view.owner.memory_needs_decision(available_bytes)
            {
                view.owner.assess(&mut self.sensors, view.facts.has_rm);
            }
            let state = view.state(&self.sensors);
            self.send_state(id, state);
        }
        self.watch_terminals();
        self.schedule_sample(now);
        Ok(())
    }

    /// Measures the load of programs that belong to no virtual machine.
    fn measure_external_load(&mut self) {
        let Some(times) = self.sensors.cpu_times() else {
            return;
        };
        let cores = self.sensors.last_sample.cores;
        if self.meter.origin_matters(times, cores) {
            let processes: Vec<i32> = self
                .connections
                .views_mut()
                .flat_map(|view| view.main_processes())
                .collect();
            self.meter.set_task_processes(&processes);
        }
        let external_load: Evidence<f32> = self.meter.measure_external(times, cores);
        self.sensors.observations.external_load = external_load;
    }

    fn schedule_sample(&mut self, now: Micros) {
        let depends_on_clock = self
            .connections
            .views_mut()
            .any(|view| view.owner.host_policy.depends_on_clock());
        let interval = self
            .sensors
            .next_interval(&mut self.reporter, depends_on_clock);
        self.next_sample_at = now + interval;
    }
}

/// Opens the socket, to which all users of the host may connect. The socket of an earlier load
/// watcher is replaced.
fn open_listener(path: &Path) -> anyhow::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).context(path.display().to_string());
        }
        _ => {}
    }
    let context = || path.display().to_string();
    let listener = UnixListener::bind(path).with_context(context)?;
    fs::set_permissions(path, PermissionsExt::from_mode(0o666)).with_context(context)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests;
