//! The main loop of the load watcher.
//!
//! It waits for a change of a watched source or for the next sample, derives a new assessment, and
//! sends the result. The daemon of this host is notified first, because it can stop guests
//! immediately; the report to the resource manager follows when nothing else is due.

use crate::Args;
use crate::boss::Boss;
use anyhow::Context;
use libpvm::{Body, Vm};
use nix::sys::epoll::Epoll;
use pvm_load_watcher::confine::Confine;
use pvm_load_watcher::guests::{Case, Decision, Door};
use pvm_load_watcher::logind::Logind;
use pvm_load_watcher::ours::{Ours, QUIET, family};
use pvm_load_watcher::owner::{Evidence, Records, Sense, Sensed, Signs, logins};
use pvm_load_watcher::policy::IDLE_AFTER_MIN;
use pvm_load_watcher::proc::used;
use pvm_load_watcher::report::{LOGINS_MAX, PAUSE_BUSY, Reporter};
use pvm_load_watcher::rules::{ADMIN_FILE, Places, Rules, VmUser, owner_file, trusted, user_name};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::senses::{KeySense, sessions, typed};
use pvm_load_watcher::sessions::Session;
use pvm_load_watcher::status::{Guest, Listener, Setting, Status, TASKS_MAX};
use pvm_load_watcher::system::{make_nice, micros, wall, wall_clock};
use pvm_load_watcher::watch::{Spot, Watch, Woken, records, utmp_path};
use pvm_load_watcher::word::{WORD_PREFIX, WORDS_DIR};
use sempa_proto::load::{LoadReport, LoadSample, OwnerVerdict, is_watcher};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::{Guests, GuestsWord, WHY_BYTES_MAX};
use sempa_proto::place::CONFINED_FILE;
use sempa_proto::table::{TASK_FORKED, TASK_SERVES, TaskInfo};
use sempa_proto::task::{Reply, Request};
use sempa_proto::text::cut;
use sempa_proto::{Micros, frame};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum interval of reading the expensive sources and of a new assessment without a change.
const RARE: Micros = Micros::from_secs(5);
/// Minimum interval of listing our tasks and measuring their load.
const TASKS_SPAN: Micros = Micros::from_secs(10);
/// The same interval while the owner limits guests, because new guests must be limited soon.
const LIMITED_SPAN: Micros = Micros::from_secs(1);
/// Time after which this load watcher exits if a resource manager exists but does not request its
/// reports.
const UNASKED_MAX: Micros = Micros::from_secs(30);
/// Interval of reading paths that cannot be watched.
const BLIND_SPAN: Micros = Micros::from_secs(10);

/// Error context of a failed sample.
const SAMPLING: &str = "sampling the load of this host";

// Indices of the watched paths.
const UTMP: usize = 0;
const SESSIONS: usize = 1;
const OWN: usize = 2;
const ADMIN: usize = 3;
const WORDS: usize = 4;
const PLACES: usize = 5;

fn say(line: &str) {
    eprintln!("pvm-load-watcher: {line}");
}

/// What the sources reported when they were last read.
struct Seen {
    records: Records,
    sessions: Evidence<Vec<Session>>,
    /// Why logind cannot be queried over D-Bus; the sessions then come from its files. `None` if
    /// they come from logind.
    unasked: Option<String>,
    typed: BTreeMap<String, Micros>,
    keys: KeySense,
    foreign: Evidence<f32>,
}

pub(crate) struct Watcher {
    vm: Vm,
    boss: Arc<Boss>,
    /// Since when a resource manager exists that has not requested reports.
    unasked: Option<Micros>,
    /// Readable when a user of this host queries the status, when logind reports a change, or when
    /// another resource manager requests reports.
    wake: Epoll,
    /// Name of the virtual machine.
    name: String,
    args: Args,
    user: u32,
    begin: Instant,
    sampler: Sampler,
    watch: Watch,
    seen: Seen,
    rules: Rules,
    sense: Sense,
    door: Door,
    ours: Ours,
    /// `None` if the system does not report its processors.
    confine: Option<Confine>,
    /// True if the owner limits guests by a nice level or by processors.
    limited: bool,
    /// External load in the last sample, in processors; 0 if unknown.
    strange: f32,
    reporter: Reporter,
    listener: Option<Listener>,
    /// `None` if logind cannot be queried; only its files are read then.
    logind: Option<Logind>,
    sample: LoadSample,
    sensed: Sensed,
    decision: Decision,
    reported: Option<Decision>,
    told: Option<GuestsWord>,
    /// The report to send when nothing else is due.
    outgoing: Option<Body>,
    deaf: Cell<bool>,
    due: Due,
}

/// Times at which the next periodic actions are due, by the watcher's monotonic clock.
#[derive(Debug, Default)]
struct Due {
    rare: Micros,
    tasks: Micros,
    blind: Micros,
}

/// Determines the watched paths, and reads the policies of owners, administrator and user.
fn read_rules(args: &Args, user: u32) -> (Watch, Rules) {
    let home = || {
        nix::unistd::User::from_uid(user.into())
            .ok()
            .flatten()
            .map(|user| user.dir)
    };
    let own = args
        .owner_policy
        .clone()
        .or_else(|| Some(owner_file(&home()?)));
    let (admin, admin_is_not) = trusted(
        args.admin_policy.clone(),
        Path::new(ADMIN_FILE),
        user.into(),
    );
    let (words, words_are_not) =
        trusted(args.owner_words.clone(), Path::new(WORDS_DIR), user.into());
    let places = Places {
        own: own.unwrap_or_else(|| PathBuf::from("/nonexistent/owner.toml")),
        admin,
        words,
    };
    let watch = Watch::new(vec![
        Spot::file(utmp_path(args.utmp.clone())),
        Spot::folder(args.sessions.clone(), ""),
        Spot::settings(places.own.clone()),
        Spot::settings(places.admin.clone()),
        Spot::folder(places.words.clone(), WORD_PREFIX),
    ]);
    let rules = Rules::read(
        places,
        VmUser {
            uid: user,
            name: user_name(user),
            wishes: args.guest_defaults.clone(),
        },
    );
    let wrong = rules.wrong();
    admin_is_not
        .iter()
        .chain(&words_are_not)
        .chain(&wrong)
        .for_each(|line| say(line));
    (watch, rules)
}

impl Watcher {
    pub(crate) fn new(vm: Vm, boss: Arc<Boss>, args: Args) -> anyhow::Result<Watcher> {
        let mut sampler = Sampler::open(Path::new("/proc")).context(SAMPLING)?;
        if let Some(meminfo) = &args.meminfo {
            sampler = sampler.memory_from(meminfo).context(SAMPLING)?;
        }
        let sample = sampler.sample(wall()).context(SAMPLING)?;
        let user = nix::unistd::geteuid().as_raw();
        let (watch, rules) = read_rules(&args, user);
        let name = std::env::var("PVM_VMID")
            .ok()
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "pvm".into());
        // Without a listener users of this host cannot query the status; everything else works.
        let listener = Listener::open(user, &name)
            .inspect_err(|e| say(&format!("nobody can ask: {e}")))
            .ok();
        let seen = Seen {
            records: records(watch.path(UTMP)),
            sessions: Evidence::Missing("not looked at yet".into()),
            unasked: None,
            typed: BTreeMap::new(),
            keys: KeySense::new(args.interrupts.clone()),
            foreign: Evidence::Missing("not measured yet".into()),
        };
        let logind = Logind::ask(args.bus.clone())
            .inspect_err(|e| say(&format!("logind cannot be asked: {e}")))
            .ok();
        let others = listener
            .iter()
            .map(Listener::fd)
            .chain(logind.iter().map(Logind::fd));
        let wake = boss.beside(others).context("watching for questions")?;
        let mut watcher = Watcher {
            vm,
            boss,
            unasked: None,
            wake,
            name,
            args,
            user,
            begin: Instant::now(),
            sampler,
            watch,
            seen,
            rules,
            sense: Sense::default(),
            door: Door::default(),
            ours: Ours::new(Path::new("/proc")),
            confine: Confine::new(beside_socket(CONFINED_FILE)).ok(),
            limited: false,
            strange: 0.0,
            reporter: Reporter::default(),
            listener,
            logind,
            sample,
            sensed: Sensed::default(),
            decision: Decision::default(),
            reported: None,
            told: None,
            outgoing: None,
            deaf: Cell::new(false),
            due: Due::default(),
        };
        watcher.read_sessions();
        watcher.seen.keys.look(wall());
        Ok(watcher)
    }

    fn now(&self) -> Micros {
        micros(self.begin.elapsed())
    }

    /// Prepares a report for the resource manager. It is sent only when nothing else is due, so
    /// that an assessment waits neither for the socket nor for the wake-up of another processor.
    fn report(&mut self) -> anyhow::Result<()> {
        let mut logins = self.sensed.logins.clone();
        logins.truncate(LOGINS_MAX);
        let Decision {
            guests,
            why: guests_why,
            limits,
        } = self.decision.clone();
        let report = LoadReport {
            host: self.vm.host(),
            at: wall(),
            sample: self.sample,
            owner: self.sensed.owner.clone(),
            confidence: self.sensed.confidence,
            why: self.sensed.why.clone(),
            logins,
            guests,
            guests_why,
            limits,
        };
        self.outgoing = Some(Body {
            enc: DSIG_X86_64,
            bytes: frame::to_bytes(&report)?.into(),
        });
        let now = self.now();
        self.reporter
            .sent(now, self.sample, report.owner, report.why);
        self.reported = Some(self.decision.clone());
        Ok(())
    }

    /// Sends the prepared report if there is one.
    fn send(&mut self) {
        if let (Some(body), Some(rm)) = (self.outgoing.take(), self.boss.tid()) {
            // A resource manager that has just exited does not receive it; the next one requests a
            // complete report.
            let _ = self.vm.send_in(rm, self.args.ctx, self.args.tag, body);
        }
    }

    /// Derives a new assessment and decision from all sources. The daemon of this host is notified
    /// first, because it can stop guests immediately.
    fn judge(&mut self) -> anyhow::Result<()> {
        let now = wall();
        let logins = logins(&self.seen.records, &self.seen.sessions);
        let before = self.rules.wrong();
        self.rules.see(&logins);
        self.say_wrong(&before);
        self.seen.typed = typed(&self.args.terminals, &logins);
        let policy = &self.rules.merged().policy;
        let idle = policy.idle_after_min.unwrap_or(IDLE_AFTER_MIN);
        let signs = Signs {
            path: self.watch.path(UTMP),
            records: &self.seen.records,
            sessions: &self.seen.sessions,
            unasked: self.seen.unasked.as_deref(),
            typed: &self.seen.typed,
            keys: self.seen.keys.evidence(),
            foreign: &self.seen.foreign,
            words: self.rules.words(),
            owners: self.rules.owners(),
            idle_after: Micros::from_secs(u64::from(idle) * 60),
        };
        self.sensed = self.sense.verdict(now, &signs);
        let is_idle = |at: &Micros| now.since(*at) >= signs.idle_after;
        let idle = self.seen.typed.iter().filter(|(_, at)| is_idle(at));
        let idle: BTreeSet<PathBuf> = idle
            .map(|(line, _)| self.args.terminals.join(line))
            .collect();
        self.watch.watch_idle(&idle);
        self.decision = self.door.decide(&Case {
            policy,
            shut: self.rules.shut(),
            blocked: self.rules.blocked(),
            user: self.user,
            owner: &self.sensed.owner,
            why: &self.sensed.why,
            available: self.sample.available_bytes,
            wall: wall_clock(now.0 / 1_000_000),
            now,
        });
        self.sampler.memory_matters(policy.memory_free.is_some());
        self.tell();
        let changed = self.reported.as_ref() != Some(&self.decision);
        if changed
            || self
                .reporter
                .owner_is_news(&self.sensed.owner, &self.sensed.why)
        {
            self.report()?;
        }
        Ok(())
    }

    /// Sends the daemon what guests may do, if that has changed.
    fn tell(&mut self) {
        let Decision {
            guests,
            why,
            limits,
        } = &self.decision;
        let word = GuestsWord {
            guests: *guests,
            why: cut(why, WHY_BYTES_MAX).to_string(),
            limits: limits.clone(),
        };
        if self.told.as_ref() == Some(&word) {
            return;
        }
        match self.vm.guests(word.clone()) {
            Ok(()) => self.deaf.set(false),
            Err(error) if !self.deaf.replace(true) => say(&format!(
                "{error}; guests are stopped only when the resource manager moves them"
            )),
            Err(_) => {}
        }
        self.told = Some(word);
    }

    /// Reads the selected sources. Missing watches are set first, so that no change between watch
    /// and read is lost.
    fn read(&mut self, which: impl Fn(usize) -> bool) {
        (0..PLACES)
            .filter(|place| which(*place))
            .for_each(|place| self.watch.arm(place));
        if which(UTMP) {
            self.seen.records = records(self.watch.path(UTMP));
        }
        if which(SESSIONS) {
            self.read_sessions();
        }
        let before = self.rules.wrong();
        if which(ADMIN) {
            self.rules.read_admin();
        }
        if which(OWN) {
            self.rules.read_own();
        }
        if which(WORDS) {
            self.rules.read_words();
        }
        self.say_wrong(&before);
    }

    /// Logs the errors of the policies that are not in `before`.
    fn say_wrong(&self, before: &[String]) {
        self.rules
            .wrong()
            .iter()
            .filter(|line| !before.contains(line))
            .for_each(|line| say(line));
    }

    /// Reads the selected paths that cannot be watched.
    fn look_where_blind(&mut self, which: impl Fn(usize) -> bool) {
        let new: Vec<bool> = (0..PLACES)
            .map(|place| which(place) && self.watch.look_for(place))
            .collect();
        self.read(|place| new[place]);
    }

    /// Reads the sessions from logind, or else from its files, which contain less.
    fn read_sessions(&mut self) {
        let why = match self.logind.as_ref().map(Logind::sessions) {
            Some(Evidence::Known(sessions)) => {
                (self.seen.sessions, self.seen.unasked) = (Evidence::Known(sessions), None);
                return;
            }
            Some(Evidence::Missing(why)) => why,
            None => "logind cannot be asked".into(),
        };
        (self.seen.sessions, self.seen.unasked) = (sessions(&self.args.sessions), Some(why));
    }

    /// Asks the daemon for the tasks of the virtual machine on this host.
    fn tasks(&self) -> Vec<TaskInfo> {
        match self.vm.runtime().request(Request::Tasks {
            selector: self.vm.host().tid(),
        }) {
            Reply::Tasks(tasks) => tasks,
            // The connection to the daemon is lost, and this task is about to exit.
            _ => Vec::new(),
        }
    }

    /// Stores in the sample which part of its load is ours, if the load is high enough to matter.
    fn measure_ours(&mut self) {
        let used = self.sample.busy * self.sample.processors();
        let Some(times) = self.sampler.times().filter(|_| used >= QUIET) else {
            self.strange = 0.0;
            return self.ours.skip();
        };
        let Some(ours) = self.ours.sample(times, self.sample.cores) else {
            return;
        };
        let before = std::mem::replace(&mut self.strange, used - ours);
        if self.strange > before + QUIET {
            // New external load may come from new tasks of ours, so they are listed first; the next
            // sample then attributes it correctly.
            self.list_ours(&self.tasks());
        } else {
            self.sample.ours = Some(ours);
        }
    }

    /// Sets the processes whose load is ours: those of these tasks, and those of the daemon.
    fn list_ours(&mut self, tasks: &[TaskInfo]) {
        let mut pids: Vec<i32> = tasks
            .iter()
            .map(|task| task.pid)
            .filter(|pid| *pid > 0)
            .collect();
        pids.extend(servants());
        self.ours.set(&pids);
    }

    /// Applies the owner's limits to guests, and measures the external load.
    fn look_at_tasks(&mut self) {
        let Some(times) = self.sampler.times() else {
            return;
        };
        let policy = &self.rules.merged().policy;
        let (nice, cores) = (policy.nice, policy.cores);
        let limited = nice.is_some()
            || self
                .confine
                .as_ref()
                .is_some_and(|confine| confine.is_needed(cores));
        if limited || self.ours.is_needed(times, self.sample.cores) {
            let tasks = self.tasks();
            if limited {
                let guests = tasks.iter().filter(|task| is_guest(task));
                let processes: Vec<i32> = guests
                    .flat_map(|task| family(Path::new("/proc"), task.pid))
                    .collect();
                // Fails for a process that has exited meanwhile, which needs no nice level.
                let levels = nice
                    .map(i32::from)
                    .into_iter()
                    .flat_map(|level| processes.iter().map(move |pid| (*pid, level)));
                levels.for_each(|(pid, level)| drop(make_nice(pid, level)));
                self.confine
                    .iter_mut()
                    .for_each(|confine| confine.keep(cores, processes.iter().copied()));
            }
            self.list_ours(&tasks);
        }
        self.limited = limited;
        self.seen.foreign = match self.ours.measure(times, self.sample.cores) {
            Some(cores) => Evidence::Known(cores),
            None => Evidence::Missing("tasks of the virtual machine came or went".into()),
        };
    }

    /// Runs the periodic actions that are due. Returns true if a new assessment is needed.
    fn rarely(&mut self, now: Micros) -> bool {
        self.look_where_blind(|place| place == UTMP);
        if now < self.due.rare {
            return self.watch.is_blind(UTMP);
        }
        self.due.rare = now + RARE;
        self.end_if_nobody_asks(now);
        if now >= self.due.blind {
            self.due.blind = now + BLIND_SPAN;
            self.look_where_blind(|place| place != UTMP);
            // A watch does not report that a file has become readable, so refused files are read
            // again.
            if self.rules.shut().is_some() {
                self.read(|place| [ADMIN, OWN, WORDS].contains(&place));
            }
        }
        self.seen.keys.look(wall());
        if now >= self.due.tasks {
            self.look_at_tasks();
            self.due.tasks = now
                + if self.limited {
                    LIMITED_SPAN
                } else {
                    TASKS_SPAN
                };
        }
        true
    }

    /// Exits if the resource manager has not requested reports for [`UNASKED_MAX`]: it has another
    /// load watcher here or wants none. Without a resource manager the load watcher keeps running
    /// to protect the owner.
    fn end_if_nobody_asks(&mut self, now: Micros) {
        if self.boss.tid().is_some() || self.vm.runtime().rm().is_none() {
            self.unasked = None;
        } else if now.since(*self.unasked.get_or_insert(now)) >= UNASKED_MAX {
            say("the present resource manager does not ask for reports; this load watcher ends");
            drop(self.vm.exit());
            std::process::exit(0);
        }
    }

    /// Returns the time until the next sample. If the policy depends on the clock, the sample is
    /// not later than the next full minute.
    fn pause(&mut self) -> Micros {
        let pause = self.reporter.pause_after(&self.sample);
        let pause = if self.watch.is_blind(UTMP) {
            PAUSE_BUSY
        } else {
            pause
        };
        if !self.rules.has_hours() {
            return pause;
        }
        pause.min(Micros(60_000_000 - wall().0 % 60_000_000))
    }

    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        self.judge()?;
        let mut next = self.now() + PAUSE_BUSY;
        let mut minute = wall().0 / 60_000_000;
        loop {
            self.send();
            let left = Duration::from_micros(next.since(self.now()).0);
            let woken: Woken = self.watch.wait(left, Some(self.wake.0.as_fd()));
            if woken.any() {
                self.read(|place| woken.has(place));
                self.judge()?;
            }
            if woken.other {
                if self.logind.as_ref().is_some_and(Logind::is_new) {
                    self.read_sessions();
                    self.judge()?;
                }
                self.answer();
                if self.boss.is_new() {
                    self.report()?;
                }
            }
            if self.now() < next {
                continue;
            }
            self.sample = self.sampler.sample(wall()).context(SAMPLING)?;
            self.measure_ours();
            let now = self.now();
            let before = std::mem::replace(&mut minute, wall().0 / 60_000_000);
            let of_hours = before != minute && self.rules.has_hours();
            let of_memory = self.door.turns(
                &self.rules.merged().policy,
                self.sample.available_bytes,
                wall(),
            );
            if self.rarely(now) || of_hours || of_memory {
                self.judge()?;
            }
            if self.reporter.load_is_news(now, &self.sample) {
                self.report()?;
            }
            next = now + self.pause();
        }
    }

    fn answer(&self) {
        if let Some(listener) = &self.listener {
            listener.answer(|| self.status());
        }
    }

    /// Collects the status for a user of this host.
    fn status(&self) -> Status {
        let (guests, leave_at_us, then) = match self.decision.guests {
            Guests::Welcome => ("welcome", None, None),
            Guests::Stopped { leave_at, then } => ("stopped", leave_at.map(|at| at.0), Some(then)),
        };
        let owner = match self.sensed.owner {
            OwnerVerdict::Absent { .. } => "absent",
            OwnerVerdict::Maybe { .. } => "maybe",
            OwnerVerdict::Present { .. } => "present",
        };
        let setting = |(name, value, from): &(&str, String, String)| Setting {
            name: name.to_string(),
            value: value.clone(),
            from: from.clone(),
        };
        let tasks = self.tasks();
        let boot = boot_time();
        let host = match self.vm.runtime().request(Request::Config) {
            Reply::Hosts(table) => table.get(self.vm.host()).map(|entry| entry.name.clone()),
            _ => None,
        };
        let (stopped_by, stopped_by_why) = stopped_by(self.vm.runtime().request(Request::Freezer));
        Status {
            vm: self.name.clone(),
            user: user_name(self.user),
            host: host.unwrap_or_default(),
            owner: owner.into(),
            confidence: self.sensed.confidence,
            why: self.sensed.why.clone(),
            sources: self
                .sensed
                .sources
                .iter()
                .map(|(name, says)| (name.to_string(), says.clone()))
                .collect(),
            guests: guests.into(),
            guests_why: self.decision.why.clone(),
            leave_at_us,
            then: then.map(|then| then.to_string()),
            stopped_by: stopped_by.into(),
            stopped_by_why,
            policy: self.rules.merged().settings.iter().map(setting).collect(),
            wrong: self.rules.wrong(),
            tasks: tasks
                .iter()
                .filter(|task| is_guest(task))
                .take(TASKS_MAX)
                .map(|task| guest(task, boot))
                .collect(),
        }
    }
}

/// True for a spawned task that does not serve the virtual machine.
fn is_guest(task: &TaskInfo) -> bool {
    task.flags & TASK_FORKED != 0 && task.flags & TASK_SERVES == 0 && !is_watcher(&task.name)
}

/// Returns the mechanism by which the daemon stops guests here, and why it is not control groups.
fn stopped_by(reply: Reply) -> (&'static str, String) {
    match reply {
        Reply::Freezer(Some(Ok(()))) => ("control groups", String::new()),
        Reply::Freezer(Some(Err(why))) => ("signals", why),
        Reply::Freezer(None) => ("unknown", "no tasker has said so far".into()),
        _ => ("unknown", "the daemon does not tell".into()),
    }
}

/// Returns the path of a file in the runtime directory of this host's daemon.
fn beside_socket(name: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("PVMSOCK")?).with_file_name(name))
}

/// Returns the pids of this host's daemon and of its child processes.
fn servants() -> Vec<i32> {
    let Some(lock) = beside_socket("pvmd.lock") else {
        return Vec::new();
    };
    let text = std::fs::read_to_string(lock).unwrap_or_default();
    let Ok(daemon) = text.trim().parse::<i32>() else {
        return Vec::new();
    };
    let children = std::fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"))
        .unwrap_or_default();
    let children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    std::iter::once(daemon).chain(children).collect()
}

/// Returns the boot time of this machine in seconds since 1970.
fn boot_time() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

fn guest(task: &TaskInfo, boot: Option<u64>) -> Guest {
    let used = std::fs::read(format!("/proc/{}/stat", task.pid))
        .ok()
        .and_then(|text| used(&text))
        .unwrap_or_default();
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .ok()
        .flatten();
    let second = ticks
        .and_then(|ticks| u64::try_from(ticks).ok())
        .filter(|ticks| *ticks > 0)
        .unwrap_or(100);
    let started = boot
        .filter(|_| used.started > 0)
        .map(|boot| boot * 1_000_000 + used.started * 1_000_000 / second);
    Guest {
        tid: task.tid.to_string(),
        program: task.name.clone(),
        pid: task.pid,
        user: user_name(task.uid),
        since_us: started.unwrap_or(0),
        cpu_s: used.ticks as f64 / second as f64,
    }
}
