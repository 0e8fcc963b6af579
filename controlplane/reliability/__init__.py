"""State machines that keep failures small: breakers, retry budgets, deadlines. Pure, no clock."""
