//! The watcher at work: waits for news of its sources and for the next sample, judges, and tells whom it concerns; the daemon
//! of this host first, because it can stop guests at once.

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

/// The dear sources are read no more often than this, and everything is judged anew.
const RARE: Micros = Micros::from_secs(5);
/// What our tasks use, and which there are, is looked at no more often than this.
const TASKS_SPAN: Micros = Micros::from_secs(10);
/// The same where the owner limits guests, who may be new.
const LIMITED_SPAN: Micros = Micros::from_secs(1);
/// While there is a resource manager that does not ask for reports it goes on for so long.
const UNASKED_MAX: Micros = Micros::from_secs(30);
/// Places that cannot be watched are looked at this often.
const BLIND_SPAN: Micros = Micros::from_secs(10);

/// What the watcher was doing when a number could not be read.
const SAMPLING: &str = "sampling the load of this host";

// The watched places, by their number.
const UTMP: usize = 0;
const SESSIONS: usize = 1;
const OWN: usize = 2;
const ADMIN: usize = 3;
const WORDS: usize = 4;
const PLACES: usize = 5;

fn say(line: &str) {
    eprintln!("pvm-load-watcher: {line}");
}

/// What the sources said when they were last read.
struct Seen {
    records: Records,
    sessions: Evidence<Vec<Session>>,
    /// Why logind cannot be asked; `None`: the sessions are its answers.
    unasked: Option<String>,
    typed: BTreeMap<String, Micros>,
    keys: KeySense,
    foreign: Evidence<f32>,
}

pub(crate) struct Watcher {
    vm: Vm,
    boss: Arc<Boss>,
    /// There is a resource manager that does not ask for reports, since then.
    unasked: Option<Micros>,
    /// Wakes for owners that ask, for news of logind, and for another boss.
    wake: Epoll,
    /// Of the virtual machine.
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
    /// `None`: the system does not say which processors there are.
    confine: Option<Confine>,
    /// The owner limits guests, by a nice level or by processors.
    limited: bool,
    /// Processors that others used by the last sample, as far as is known.
    strange: f32,
    reporter: Reporter,
    listener: Option<Listener>,
    /// `None`: its files are all there is.
    logind: Option<Logind>,
    sample: LoadSample,
    sensed: Sensed,
    decision: Decision,
    reported: Option<Decision>,
    told: Option<GuestsWord>,
    /// The report that is to be sent.
    outgoing: Option<Body>,
    deaf: Cell<bool>,
    due: Due,
}

/// When what is due next, on the watcher's own clock.
#[derive(Debug, Default)]
struct Due {
    rare: Micros,
    tasks: Micros,
    blind: Micros,
}

/// What is watched, and what owners, administrator and user say.
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
        // Without it the owner is not told; everything else goes on.
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

    /// Writes down all there is to know, for the resource manager. It is sent when nothing else is to be done: whoever judges
    /// waits neither for the socket nor for a processor that has to be woken.
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

    /// Sends what was written down last, if anything was.
    fn send(&mut self) {
        if let (Some(body), Some(rm)) = (self.outgoing.take(), self.boss.tid()) {
            // One that has just ended hears nothing, and the next one asks for everything anew.
            let _ = self.vm.send_in(rm, self.args.ctx, self.args.tag, body);
        }
    }

    /// Judges everything anew. The daemon of this host hears first, because it can stop guests at once.
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

    /// Tells the daemon what guests may do, if that has changed.
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

    /// Reads the sources that may have changed. The watches come first, so that no change falls between.
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

    /// Says what is wrong with the rules that was not before.
    fn say_wrong(&self, before: &[String]) {
        self.rules
            .wrong()
            .iter()
            .filter(|line| !before.contains(line))
            .for_each(|line| say(line));
    }

    /// Reads those of these places that cannot be watched.
    fn look_where_blind(&mut self, which: impl Fn(usize) -> bool) {
        let new: Vec<bool> = (0..PLACES)
            .map(|place| which(place) && self.watch.look_for(place))
            .collect();
        self.read(|place| new[place]);
    }

    /// By logind's answers, or else by its files, which tell less.
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

    /// The tasks of the virtual machine on this host, by its daemon.
    fn tasks(&self) -> Vec<TaskInfo> {
        match self.vm.runtime().request(Request::Tasks {
            selector: self.vm.host().tid(),
        }) {
            Reply::Tasks(tasks) => tasks,
            // The daemon is gone, and this task is about to end.
            _ => Vec::new(),
        }
    }

    /// Says in the sample what of it is ours, if it is more than what may be left out of account.
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
            // Load that is new may be of tasks that are new: the next sample tells.
            self.list_ours(&self.tasks());
        } else {
            self.sample.ours = Some(ours);
        }
    }

    /// Reads from now on what these tasks use, and what serves them.
    fn list_ours(&mut self, tasks: &[TaskInfo]) {
        let mut pids: Vec<i32> = tasks
            .iter()
            .map(|task| task.pid)
            .filter(|pid| *pid > 0)
            .collect();
        pids.extend(servants());
        self.ours.set(&pids);
    }

    /// Whose load is it, and are guests nice enough?
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
                // One that has ended meanwhile needs no level.
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

    /// What is not worth doing at every sample. True: judge.
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
            // Of a file that could not be read no watch says that it can be.
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

    /// Without a resource manager it goes on for the owner's sake. One that does not ask for reports has a load watcher of its own
    /// here, or wants none.
    fn end_if_nobody_asks(&mut self, now: Micros) {
        if self.boss.tid().is_some() || self.vm.runtime().rm().is_none() {
            self.unasked = None;
        } else if now.since(*self.unasked.get_or_insert(now)) >= UNASKED_MAX {
            say("the present resource manager does not ask for reports; this load watcher ends");
            drop(self.vm.exit());
            std::process::exit(0);
        }
    }

    /// The pause before the next sample; where the clock counts, not over a full minute.
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

    /// What the owner wants to know.
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

/// A spawned task that does not serve the virtual machine.
fn is_guest(task: &TaskInfo) -> bool {
    task.flags & TASK_FORKED != 0 && task.flags & TASK_SERVES == 0 && !is_watcher(&task.name)
}

/// How the daemon has guests stopped here, and why not by control groups.
fn stopped_by(reply: Reply) -> (&'static str, String) {
    match reply {
        Reply::Freezer(Some(Ok(()))) => ("control groups", String::new()),
        Reply::Freezer(Some(Err(why))) => ("signals", why),
        Reply::Freezer(None) => ("unknown", "no tasker has said so far".into()),
        _ => ("unknown", "the daemon does not tell".into()),
    }
}

/// A file in the place of the daemon of this host.
fn beside_socket(name: &str) -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("PVMSOCK")?).with_file_name(name))
}

/// The daemon of this host, and what works for it.
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

/// When this machine was started, in seconds since 1970.
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
