//! Placement by an external chooser that the policy names.

use crate::common::{TestBed, request, rm_tid as own, world};
use bytes::Bytes;
use pvm_rm::decide::{Chooser, ChooserName, Choosers, HostOffer, PlacementPolicy};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::{Options, Service, ServiceError, TAG_POLICY};
use sempa_proto::PvmError;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use std::sync::Arc;

/// A chooser that selects the host with the highest number for up to two tasks.
struct HighestHost;

impl Chooser for HighestHost {
    fn name(&self) -> &str {
        "last"
    }

    fn choose(
        &self,
        request: &SpawnRequest,
        offers: &[HostOffer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String> {
        if request.file == "unwanted" {
            return Err("it has no reservation".into());
        }
        let last = (0..offers.len())
            .max_by_key(|i| offers[*i].host.id)
            .ok_or("nothing is offered")?;
        Ok(vec![last; count.min(2)])
    }
}

fn policy_with_choice(name: &str) -> EffectivePolicy {
    EffectivePolicy {
        placing: PlacementPolicy::Choice(ChooserName::new(name).expect("a name")),
        ..EffectivePolicy::default()
    }
}

fn options(name: &str) -> Options {
    let (conduct, choices) = (
        policy_with_choice(name),
        Choosers::new([Arc::new(HighestHost) as Arc<dyn Chooser>]),
    );
    Options {
        policy: conduct,
        command_line_policy: conduct,
        choosers: choices,
        watchers: true,
        policy_file: "rm.toml".into(),
        ..Options::default()
    }
}

/// If the policy names an external chooser, its selection is checked and explained.
#[test]
fn external_choice_is_checked_and_reported() {
    let vm = world(3);
    let mut bed = TestBed::quiet_with(&vm, options("last"));
    bed.report_owner_present(3);
    bed.world().spawn(1, &request(3));
    bed.settle();
    let execs = bed.world().take_start_orders();
    let places: Vec<(u16, u32)> = execs
        .iter()
        .map(|exec| (exec.host.index(), exec.request.count))
        .collect();
    assert_eq!(places, [(2, 2)], "h3 was not offered");
    execs.iter().for_each(|exec| drop(bed.world().ack(exec)));
    bed.settle();
    let answer = bed.world().spawn_reply(1).expect("answered").expect("good");
    assert_eq!(answer[2], Err(PvmError::OutOfRes), "he has places for two");
    let told: Vec<String> = bed
        .world()
        .records
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(
        told.iter()
            .any(|text| text.contains("chosen by last; room for 2 of 3")),
        "{told:?}"
    );
    bed.world().spawn(
        2,
        &SpawnRequest {
            file: "unwanted".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(
        bed.world()
            .spawn_reply(2)
            .expect("answered")
            .expect("tried"),
        [Err(PvmError::OutOfRes)]
    );
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("last chose no host: it has no reservation")),
        "{notes:?}"
    );
    // A request that names a host does not reach the chooser.
    bed.world().spawn(
        3,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h1".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(bed.world().take_start_orders()[0].host.index(), 1);
}

/// A policy that names an unknown chooser is refused, and the error lists the available ones.
#[test]
fn unknown_chooser_is_refused() {
    let error = Service::start(world(1), options("slurm"))
        .map(|_| ())
        .expect_err("nobody is called so");
    assert!(
        matches!(&error, ServiceError::UnknownChooser(no) if no.name == "slurm" && no.available == "there are last"),
        "{error}"
    );
    let vm = world(3);
    let mut bed = TestBed::quiet_with(
        &vm,
        Options {
            choosers: Choosers::default(),
            ..options("last").with(PlacementPolicy::Load)
        },
    );
    let change = |bed: &mut TestBed, text: &'static str| {
        bed.world().post(
            own(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.settle();
        bed.world().notes().pop().unwrap_or_default()
    };
    let told = change(&mut bed, "placing = \"choice:last\"\n");
    assert!(
        told.contains("rm.toml: the policy names the chooser \"last\", but this resource manager has no chooser"),
        "{told}"
    );
    assert!(told.ends_with("and the policy is unchanged"), "{told}");
    bed.world().spawn(1, &request(3));
    bed.settle();
    assert_eq!(
        bed.world().take_start_orders().len(),
        3,
        "by load as before"
    );
}

/// Method that replaces the placement policy of options.
trait WithPolicy {
    fn with(self, placing: PlacementPolicy) -> Self;
}

impl WithPolicy for Options {
    fn with(self, placing: PlacementPolicy) -> Options {
        let conduct = EffectivePolicy {
            placing,
            ..self.policy
        };
        Options {
            policy: conduct,
            command_line_policy: conduct,
            ..self
        }
    }
}
