//! The rows of `bench broker`, and how each of them is measured.

use super::BrokerSettings;
use anyhow::{Context, Result, ensure};
use sempa_tests::run::{RunningCommand, run_successfully, wait_for};
use sempa_tests::testbed::Host;
use sempa_tests::{CommandResult, Vm};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time limit for each step of a measurement.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Largest number of brokers on one host, a limit of the broker.
const SESSIONS_PER_HOST: usize = 48;
/// Divisor of the number of messages in a quick run.
const QUICK_DIVISOR: usize = 10;
/// Number of messages to a member and back in each of many sessions.
const ROUNDS_OF_MANY_SESSIONS: usize = 20;

/// Figures of one measurement by name. The end of the name is the unit.
pub(super) type Figures = BTreeMap<String, f64>;

/// Place of the members that answer the foreman.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberPlace {
    Inside,
    Outside,
}

/// When messages are on the disk, as an option of `pvm-broker start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    Sync,
    Write,
}

impl Durability {
    fn option(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Write => "write",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One member sends to another one.
    Stream {
        bytes: usize,
        messages: usize,
    },
    /// Each message waits for its verdict, or for its answer.
    Single {
        bytes: usize,
        messages: usize,
    },
    /// Members answer the foreman.
    Farm {
        members: usize,
        messages: usize,
    },
    Joins {
        count: usize,
    },
    Iprobe {
        calls: usize,
    },
    /// Sessions at once, each with a foreman and a worker.
    Sessions {
        count: usize,
    },
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measurement {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) kind: Kind,
    pub(super) place: MemberPlace,
    durability: Durability,
}

impl Measurement {
    const fn new(
        name: &'static str,
        title: &'static str,
        kind: Kind,
        place: MemberPlace,
        durability: Durability,
    ) -> Self {
        Self {
            name,
            title,
            kind,
            place,
            durability,
        }
    }

    /// True for rows that need too many processes for a quick run.
    pub(super) fn is_only_in_full_runs(&self) -> bool {
        matches!(self.kind, Kind::Sessions { count } if count > SESSIONS_PER_HOST)
    }

    fn host_count(&self) -> usize {
        match self.kind {
            Kind::Sessions { count } => count.div_ceil(SESSIONS_PER_HOST),
            _ => 1,
        }
    }
}

const fn stream(bytes: usize, messages: usize) -> Kind {
    Kind::Stream { bytes, messages }
}

const fn farm(members: usize) -> Kind {
    Kind::Farm {
        members,
        messages: 20_000,
    }
}

const INSIDE: MemberPlace = MemberPlace::Inside;
const OUTSIDE: MemberPlace = MemberPlace::Outside;
const SYNC: Durability = Durability::Sync;
const WRITE: Durability = Durability::Write;
const SMALL: Kind = stream(8, 50_000);
const LARGE: Kind = stream(64 << 10, 5_000);
const SINGLE: Kind = Kind::Single {
    bytes: 8,
    messages: 2_000,
};

/// All rows. Rows with more hosts come last, because hosts are added and not removed.
pub(super) const MEASUREMENTS: [Measurement; 19] = [
    Measurement::new("pair8", "one pair, 8 B", SMALL, INSIDE, SYNC),
    Measurement::new(
        "pair8-write",
        "one pair, 8 B, journal not forced",
        SMALL,
        INSIDE,
        WRITE,
    ),
    Measurement::new(
        "pair8-outside",
        "one pair, 8 B, worker outside",
        SMALL,
        OUTSIDE,
        SYNC,
    ),
    Measurement::new("pair64k", "one pair, 64 KiB", LARGE, INSIDE, SYNC),
    Measurement::new(
        "pair64k-write",
        "one pair, 64 KiB, journal not forced",
        LARGE,
        INSIDE,
        WRITE,
    ),
    Measurement::new(
        "pair64k-outside",
        "one pair, 64 KiB, worker outside",
        LARGE,
        OUTSIDE,
        SYNC,
    ),
    Measurement::new("single8", "one at a time, 8 B", SINGLE, INSIDE, SYNC),
    Measurement::new(
        "single8-write",
        "one at a time, 8 B, journal not forced",
        SINGLE,
        INSIDE,
        WRITE,
    ),
    Measurement::new("farm1", "foreman and 1 member", farm(1), INSIDE, SYNC),
    Measurement::new("farm10", "foreman and 10 members", farm(10), INSIDE, SYNC),
    Measurement::new(
        "farm125",
        "foreman and 125 members",
        farm(125),
        INSIDE,
        SYNC,
    ),
    Measurement::new(
        "farm1-outside",
        "foreman and 1 member outside",
        farm(1),
        OUTSIDE,
        SYNC,
    ),
    Measurement::new(
        "farm10-outside",
        "foreman and 10 members outside",
        farm(10),
        OUTSIDE,
        SYNC,
    ),
    Measurement::new(
        "farm125-outside",
        "foreman and 125 members outside",
        farm(125),
        OUTSIDE,
        SYNC,
    ),
    Measurement::new(
        "joins",
        "joins inside",
        Kind::Joins { count: 1_000 },
        INSIDE,
        SYNC,
    ),
    Measurement::new(
        "joins-outside",
        "joins outside",
        Kind::Joins { count: 400 },
        OUTSIDE,
        SYNC,
    ),
    Measurement::new(
        "iprobe",
        "iprobe",
        Kind::Iprobe { calls: 1_000_000 },
        INSIDE,
        SYNC,
    ),
    Measurement::new(
        "sessions48",
        "48 sessions at once",
        Kind::Sessions { count: 48 },
        INSIDE,
        SYNC,
    ),
    Measurement::new(
        "sessions480",
        "480 sessions at once",
        Kind::Sessions { count: 480 },
        INSIDE,
        SYNC,
    ),
];

/// Returns the number of hosts for the row with the most.
pub(super) fn needed_host_count(measurements: &[&Measurement]) -> usize {
    let counts = measurements.iter().map(|row| row.host_count());
    counts.max().unwrap_or(1)
}

/// Memory and descriptors of all brokers of the virtual machine.
#[derive(Clone, Copy, Debug, Default)]
struct Resources {
    brokers: usize,
    /// Resident memory, with pages that brokers share counted in shares.
    memory_kib: f64,
    descriptors: usize,
}

/// A virtual machine that is measured.
pub(super) struct Bench<'a> {
    vm: &'a Vm<'a>,
    program: PathBuf,
    is_quick: bool,
    host_count: usize,
    session_count: usize,
}

/// Returns the newest JSON object that a program has printed.
fn newest_figures(output: &str) -> Option<Value> {
    let mut lines = output.lines().filter(|line| line.starts_with('{'));
    serde_json::from_str(lines.next_back()?).ok()
}

fn number(figures: &Value, name: &str) -> Result<f64> {
    let number = figures[name].as_f64();
    number.with_context(|| format!("{name} is missing in {figures}"))
}

fn read_resources(pid: u32) -> Result<(f64, usize)> {
    let proc = Path::new("/proc").join(pid.to_string());
    let rollup = fs::read_to_string(proc.join("smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let descriptors = fs::read_dir(proc.join("fd"))?.count();
    Ok((kib.context("no size in smaps_rollup")?, descriptors))
}

impl<'a> Bench<'a> {
    pub(super) fn new(vm: &'a Vm<'a>, settings: &BrokerSettings) -> Result<Self> {
        // The user's folder is visible in all hosts.
        let program = vm.user_home().join("broker-load");
        fs::copy(&settings.load_program, &program)
            .with_context(|| settings.load_program.display().to_string())?;
        Ok(Self {
            vm,
            program,
            is_quick: settings.is_quick,
            host_count: 1,
            session_count: 0,
        })
    }

    fn h1(&self) -> &'a Host {
        self.vm.testbed().host(1)
    }

    fn messages(&self, full_count: usize) -> usize {
        match self.is_quick {
            true => full_count / QUICK_DIVISOR,
            false => full_count,
        }
    }

    pub(super) fn measure(&mut self, row: &Measurement) -> Result<Figures> {
        if let Kind::Sessions { count } = row.kind {
            return self.measure_sessions(row.host_count(), count);
        }
        let session = self.start_session(row.durability)?;
        let foreman_session = session.clone();
        let member_session = match row.place {
            MemberPlace::Inside => session,
            MemberPlace::Outside => self.session_file(&session)?,
        };
        let figures = match row.kind {
            Kind::Stream { bytes, messages } => {
                let workers = self.start_members(row.place, &member_session, 1)?;
                let [bytes, messages] = [bytes, self.messages(messages)].map(|n| n.to_string());
                let figures = self.run(&["stream", &foreman_session, &bytes, &messages])?;
                finish(workers)?;
                self.figures_of(&figures, &["messages_per_second"])?
            }
            Kind::Single { bytes, messages } => {
                let workers = self.start_members(row.place, &member_session, 1)?;
                let [bytes, messages] = [bytes, self.messages(messages)].map(|n| n.to_string());
                let figures = self.run(&["single", &foreman_session, &bytes, &messages])?;
                finish(workers)?;
                self.figures_of(&figures, &["send_us", "answer_us"])?
            }
            Kind::Farm { members, messages } => {
                let workers = self.start_members(row.place, &member_session, members)?;
                self.measure_farm(&foreman_session, workers, members, self.messages(messages))?
            }
            Kind::Joins { count } => {
                let host = self.host_of(row.place);
                let count = self.messages(count).to_string();
                let mut joins = self.start(host, &["joins", &member_session, &count])?;
                let figures = wait_for_figures(&mut joins, "joins_per_second")?;
                drop(joins.take_stdin());
                joins.wait_or_kill(TIMEOUT)?;
                self.pvm_broker(&["end", &foreman_session, "--within", "0"])?;
                self.figures_of(&figures, &["joins_per_second"])?
            }
            Kind::Iprobe { calls } => {
                let calls = self.messages(calls).to_string();
                let figures = self.run(&["iprobe", &foreman_session, &calls])?;
                self.figures_of(&figures, &["empty_ns", "stored_ns"])?
            }
            Kind::Sessions { .. } => Figures::new(),
        };
        self.wait_for_brokers(0)?;
        Ok(figures)
    }

    fn measure_farm(
        &self,
        session: &str,
        workers: RunningCommand,
        members: usize,
        messages: usize,
    ) -> Result<Figures> {
        let [members, messages] = [members, messages].map(|n| n.to_string());
        let mut foreman = self.start(self.h1(), &["farm", session, &members, "8", &messages])?;
        let figures = wait_for_figures(&mut foreman, "messages_per_second")?;
        let mut result = self.figures_of(&figures, &["messages_per_second"])?;
        let resources = self.resources()?;
        result.insert("memory_mib".into(), resources.memory_kib / 1024.0);
        result.insert("descriptors".into(), resources.descriptors as f64);
        drop(foreman.take_stdin());
        let finished_at = number(&finish(foreman)?, "finished_at_us")?;
        let ended_at = number(&finish(workers)?, "ended_at_us")?;
        result.insert("end_ms".into(), (ended_at - finished_at) / 1e3);
        Ok(result)
    }

    /// Measures sessions at once: the hosts start their shares at the same time.
    fn measure_sessions(&mut self, host_count: usize, count: usize) -> Result<Figures> {
        let testbed = self.vm.testbed();
        let new_hosts = self.host_count + 1..=host_count;
        let names: Vec<&str> = new_hosts
            .map(|number| testbed.host(number).name())
            .collect();
        if !names.is_empty() {
            self.vm.add_hosts(&names)?;
            self.host_count = host_count;
        }
        let share = (count / host_count).to_string();
        let rounds = ROUNDS_OF_MANY_SESSIONS.to_string();
        self.session_count += 1;
        let started_at = Instant::now();
        let mut programs = (1..=host_count)
            .map(|number| {
                let prefix = format!("m{}-{number}-", self.session_count);
                self.start(testbed.host(number), &["many", &prefix, &share, &rounds])
            })
            .collect::<Result<Vec<_>>>()?;
        for program in &mut programs {
            wait_for_figures(program, "sessions_per_second")?;
        }
        let starts = count as f64 / started_at.elapsed().as_secs_f64();
        let resources = self.resources()?;
        ensure!(
            resources.brokers == count,
            "{resources:?} for {count} sessions"
        );
        let mut inputs = Vec::new();
        for program in &mut programs {
            inputs.push(program.take_stdin().context("its input is piped")?);
        }
        let mut say_next = |line: &str| {
            inputs
                .iter_mut()
                .try_for_each(|input| writeln!(input, "{line}"))
        };
        say_next("exchange")?;
        let mut rate = 0.0;
        for program in &mut programs {
            let figures = wait_for_figures(program, "messages_per_second")?;
            rate += number(&figures, "messages_per_second")?;
        }
        let finished_at = Instant::now();
        say_next("finish")?;
        for program in programs {
            finish(program)?;
        }
        self.wait_for_brokers(0)?;
        let per_session = |value: f64| value / count as f64;
        Ok(Figures::from([
            ("sessions_per_second".into(), starts),
            ("messages_per_second".into(), rate),
            (
                "memory_mib".into(),
                per_session(resources.memory_kib / 1024.0),
            ),
            (
                "descriptors".into(),
                per_session(resources.descriptors as f64),
            ),
            ("end_ms".into(), finished_at.elapsed().as_secs_f64() * 1e3),
        ]))
    }

    fn figures_of(&self, figures: &Value, names: &[&str]) -> Result<Figures> {
        let named = names.iter();
        named
            .map(|name| Ok((name.to_string(), number(figures, name)?)))
            .collect()
    }

    fn host_of(&self, place: MemberPlace) -> &'a Host {
        match place {
            MemberPlace::Inside => self.h1(),
            MemberPlace::Outside => self.vm.testbed().outside_host(),
        }
    }

    fn start(&self, host: &Host, arguments: &[&str]) -> Result<RunningCommand> {
        let mut command = self.vm.user_command(host, &self.program);
        command.args(arguments);
        RunningCommand::start(command, Stdio::piped())
    }

    fn start_members(
        &self,
        place: MemberPlace,
        session: &str,
        count: usize,
    ) -> Result<RunningCommand> {
        self.start(self.host_of(place), &["echo", session, &count.to_string()])
    }

    /// Runs the measuring program on h1 and returns its figures.
    fn run(&self, arguments: &[&str]) -> Result<Value> {
        finish(self.start(self.h1(), arguments)?)
    }

    fn pvm_broker(&self, arguments: &[&str]) -> Result<CommandResult> {
        let mut command = self.vm.user_command(self.h1(), "pvm-broker");
        command.args(arguments);
        run_successfully(command, TIMEOUT)
    }

    fn start_session(&mut self, durability: Durability) -> Result<String> {
        self.session_count += 1;
        let session = format!("b{}", self.session_count);
        let journal = durability.option();
        let limits = ["--joins-per-second", "1000000", "--members", "100000"];
        let start = [
            "start",
            &session,
            "--host",
            "h1",
            "--linger",
            "0",
            "--journal",
            journal,
        ];
        self.pvm_broker(&[&start[..], &limits[..]].concat())?;
        Ok(session)
    }

    fn session_file(&self, session: &str) -> Result<String> {
        let path = self.vm.user_home().join(format!("{session}.session"));
        let path = path.to_str().context("a path in UTF-8")?.to_string();
        self.pvm_broker(&["secret", session, "--output", &path])?;
        Ok(path)
    }

    fn broker_pids(&self) -> Vec<u32> {
        let hosts = self.vm.testbed().hosts().iter();
        let processes = hosts.flat_map(Host::processes);
        processes
            .filter(|(_, line)| line.contains("pvm-broker serve"))
            .map(|(pid, _)| pid)
            .collect()
    }

    fn resources(&self) -> Result<Resources> {
        let mut resources = Resources::default();
        for pid in self.broker_pids() {
            let (memory_kib, descriptors) = read_resources(pid)?;
            resources.brokers += 1;
            resources.memory_kib += memory_kib;
            resources.descriptors += descriptors;
        }
        Ok(resources)
    }

    fn wait_for_brokers(&self, count: usize) -> Result<()> {
        wait_for(TIMEOUT, || match self.broker_pids().len() {
            running if running == count => Ok(()),
            running => Err(format!("{running} brokers run")),
        })
    }
}

/// Waits until a program has printed figures with the name `name`.
///
/// # Errors
/// The program has ended before, or the time limit has passed.
fn wait_for_figures(program: &mut RunningCommand, name: &str) -> Result<Value> {
    let answer = wait_for(TIMEOUT, || {
        let text = |error: anyhow::Error| error.to_string();
        let status = program.poll_status().map_err(text)?;
        let output = program.stdout_so_far().map_err(text)?;
        let figures = newest_figures(&output).filter(|figures| !figures[name].is_null());
        match (figures, status) {
            (Some(figures), _) => Ok(Ok(figures)),
            (None, Some(status)) => {
                let errors = program.stderr_so_far().map_err(text)?;
                Ok(Err(format!("{status} without {name}: {output} {errors}")))
            }
            (None, None) => Err(format!("no {name} in {output:?}")),
        }
    })?;
    answer.map_err(anyhow::Error::msg)
}

/// Waits until a measuring program has ended, and returns its newest figures.
fn finish(program: RunningCommand) -> Result<Value> {
    let result = program
        .wait_or_kill(TIMEOUT)?
        .expect_success("the measuring program")?;
    newest_figures(&result.stdout).with_context(|| format!("no figures in {result:?}"))
}
