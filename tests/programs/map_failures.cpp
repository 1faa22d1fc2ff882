/* Squares 0 to 9 with MWMap. The function fails for 3 and 7; the program prints their places. */
#include <MWMap.h>
#include <cstdio>
#include <stdexcept>

static int square(int number)
{
    if (number % 4 == 3) throw std::runtime_error("this number has no square today");
    return number * number;
}

int main()
{
    std::vector<int> numbers;
    for (int number = 0; number < 10; ++number) numbers.push_back(number);
    std::vector<size_t> failed;
    std::vector<int> squares = MWMap("squares", square, numbers, 2, &failed);
    int sum = 0;
    for (size_t place = 0; place < squares.size(); ++place) sum += squares[place];
    std::printf("sum %d failed", sum);
    for (size_t i = 0; i < failed.size(); ++i) std::printf(" %lu", static_cast<unsigned long>(failed[i]));
    std::printf("\n");
}
