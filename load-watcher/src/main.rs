//! `pvm-load-watcher`: tells the resource manager about the load and the owner of the host it runs on.

use anyhow::Context;
use clap::Parser;
use libpvm::{Body, Match, Vm};
use pvm_load_watcher::owner::{Records, Sense};
use pvm_load_watcher::report::{LOGINS_MAX, PAUSE_BUSY, Reporter};
use pvm_load_watcher::sampler::Sampler;
use pvm_load_watcher::watch::{Watch, utmp_path};
use sempa_proto::load::{GuestLimits, LoadReport, LoadSample, OwnerVerdict};
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::owner::{Guests, Leave};
use sempa_proto::task::{NotifyRequest, NotifyWhat};
use sempa_proto::{Micros, Tid, frame};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Watches one host for the resource manager of a Sempa virtual machine: samples its load and senses its owner.
///
/// The resource manager starts one on every host; it ends with the resource manager. Somebody who is logged in counts as
/// the owner of the host: a login is reported within milliseconds, the load when it changes and every ten seconds.
#[derive(Debug, Parser)]
#[command(name = "pvm-load-watcher", version)]
struct Args {
    /// Task id of the resource manager, as 't40002'.
    #[arg(long, value_name = "TID", value_parser = parse_tid)]
    report_to: Tid,
    /// Context of the reports.
    #[arg(long, default_value_t = 0)]
    ctx: i32,
    /// Tag of the reports.
    #[arg(long, default_value_t = 5)]
    tag: i32,
    /// File of the login records [default: /run/utmp, then /var/run/utmp].
    #[arg(long, env = "SEMPA_UTMP", value_name = "FILE")]
    utmp: Option<PathBuf>,
}

/// Tag of the notification that the resource manager has ended.
const TAG_RM_GONE: i32 = 1;

fn parse_tid(text: &str) -> Result<Tid, String> {
    let raw = u32::from_str_radix(text.strip_prefix('t').unwrap_or(text), 16);
    let tid = raw.ok().map(|raw| Tid::from_raw(raw.cast_signed())).filter(|tid| tid.is_task());
    tid.ok_or_else(|| format!("{text:?} is not the id of a task; it looks like t40002"))
}

fn micros(span: Duration) -> Micros {
    Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
}

fn wall() -> Micros {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

struct Watcher {
    vm: Vm,
    args: Args,
    begin: Instant,
    sampler: Sampler,
    watch: Watch,
    sense: Sense,
    reporter: Reporter,
    sample: LoadSample,
    owner: (OwnerVerdict, String),
    records: Records,
}

impl Watcher {
    fn new(vm: Vm, args: Args) -> anyhow::Result<Watcher> {
        let mut sampler = Sampler::open(Path::new("/proc")).context("sampling the load of this host")?;
        let sample = sampler.sample(wall()).context("sampling the load of this host")?;
        let mut watch = Watch::new(utmp_path(args.utmp.clone()));
        let (records, mut sense) = (watch.read(), Sense::default());
        let owner = sense.verdict(wall(), watch.path(), &records);
        let (begin, reporter) = (Instant::now(), Reporter::default());
        Ok(Watcher { vm, args, begin, sampler, watch, sense, reporter, sample, owner, records })
    }

    fn now(&self) -> Micros {
        micros(self.begin.elapsed())
    }

    /// Tells the resource manager all there is to know.
    fn report(&mut self) -> anyhow::Result<()> {
        let mut logins = match &self.records {
            Records::Logins(logins) => logins.clone(),
            Records::Missing | Records::Unreadable(_) => Vec::new(),
        };
        logins.truncate(LOGINS_MAX);
        let (owner, why) = self.owner.clone();
        let host = self.vm.host();
        let present = matches!(owner, OwnerVerdict::Present { .. });
        let guests = match owner {
            OwnerVerdict::Present { seen, .. } => Guests::Stopped { leave_at: Some(seen), then: Leave::Move },
            _ => Guests::Welcome,
        };
        let report = LoadReport {
            host,
            at: wall(),
            sample: self.sample,
            owner: owner.clone(),
            confidence: 90,
            why: why.clone(),
            logins,
            guests,
            guests_why: if present { why.clone() } else { String::new() },
            limits: GuestLimits::default(),
        };
        let body = Body { enc: DSIG_X86_64, bytes: frame::to_bytes(&report)?.into() };
        self.vm.send_in(self.args.report_to, self.args.ctx, self.args.tag, body)?;
        self.reporter.sent(self.now(), self.sample, owner, why);
        Ok(())
    }

    /// Reads the login records; a change is reported before anything else is done.
    fn look(&mut self) -> anyhow::Result<()> {
        self.records = self.watch.read();
        self.owner = self.sense.verdict(wall(), self.watch.path(), &self.records);
        if self.reporter.owner_is_news(&self.owner.0, &self.owner.1) {
            self.report()?;
        }
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<()> {
        self.report()?;
        let mut next = self.now() + PAUSE_BUSY;
        loop {
            let left = next.since(self.now());
            if self.watch.wait(Duration::from_micros(left.0)) {
                self.look()?;
                continue;
            }
            if self.watch.is_blind() {
                self.look()?;
            }
            self.sample = self.sampler.sample(wall()).context("sampling the load of this host")?;
            let now = self.now();
            if self.reporter.load_is_news(now, &self.sample) {
                self.report()?;
            }
            let pause = self.reporter.pause_after(&self.sample);
            next = now + if self.watch.is_blind() { PAUSE_BUSY } else { pause };
        }
    }
}

/// Ends this process when the resource manager has ended, or the virtual machine.
fn end_with(vm: &Vm, rm: Tid) -> anyhow::Result<()> {
    // A context of one's own: nothing else is received with it.
    let ctx = vm.tid().raw();
    vm.notify(NotifyRequest { what: NotifyWhat::TaskExit(vec![rm]), ctx, tag: TAG_RM_GONE, cancel: false })?;
    let vm = vm.clone();
    std::thread::Builder::new().name("rm-gone".into()).spawn(move || {
        drop(vm.recv(Match::any().ctx(ctx).tag(TAG_RM_GONE)));
        drop(vm.exit());
        std::process::exit(0);
    })?;
    Ok(())
}

fn run(args: Args) -> anyhow::Result<()> {
    let vm = Vm::enroll()?;
    end_with(&vm, args.report_to)?;
    Watcher::new(vm, args)?.run()
}

/// The error and its causes, each said once: some sentences contain their cause already.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvm-load-watcher: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}
