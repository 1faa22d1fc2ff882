//! Passes random inputs to the readers. The first argument is the number of inputs (default: one
//! million), the second one is the seed (default: 1).

fn main() {
    let number = |at: usize, otherwise: u64| {
        std::env::args()
            .nth(at)
            .and_then(|n| n.parse().ok())
            .unwrap_or(otherwise)
    };
    let (count, mut dice) = (
        number(1, 1_000_000),
        sempa_fuzz::InputRng(number(2, 1).max(1)),
    );
    for _ in 0..count {
        sempa_fuzz::read_input(&dice.next_input());
    }
    println!("{count} inputs, nothing broke");
}
